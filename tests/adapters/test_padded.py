"""Padded rows against the packed form, in transformers' Qwen-VL."""

from __future__ import annotations

import torch
from support.tiny_models import (
    IMAGE,
    INFO,
    aligned_batch,
    documents,
    empty_batch,
    loss_sum,
    mixed_batch,
    qwen2_5_vl,
    qwen3_vl,
    text_batch,
)

from trainer_client.adapters.padded import padded_inputs
from trainer_client.adapters.qwen_vl import qwen_vl_inputs


def test_the_same_loss_as_packed() -> None:
    for build in (qwen2_5_vl, qwen3_vl):
        for make in (mixed_batch, aligned_batch, text_batch):
            model, batch = build(), make()
            packed = qwen_vl_inputs(batch, image_token=IMAGE, dtype=torch.float64)
            rows = padded_inputs(
                batch, pad_token=INFO.pad_token, image_token=IMAGE, dtype=torch.float64
            )
            assert rows["input_ids"].shape[0] == len(list(documents(batch))) > 1
            expected = loss_sum(model(**packed).logits, packed["labels"])
            got = loss_sum(model(**rows).logits, rows["labels"])
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)


def test_rows_are_the_documents() -> None:
    batch = aligned_batch()
    rows = padded_inputs(batch, pad_token=7, multiple_of=16)
    assert rows["input_ids"].shape[1] % 16 == 0
    for number, (tokens, _) in enumerate(documents(batch)):
        length = tokens.stop - tokens.start
        assert rows["attention_mask"][number].sum() == length
        assert torch.equal(rows["input_ids"][number, :length], batch["input_ids"][tokens])
        assert torch.equal(rows["labels"][number, :length], batch["labels"][tokens])
        assert set(rows["input_ids"][number, length:].tolist()) <= {7}
        assert set(rows["labels"][number, length:].tolist()) <= {-100}
    assert "mm_token_type_ids" not in rows


def test_a_micro_batch_without_a_document_is_one_row() -> None:
    rows = padded_inputs(empty_batch(), pad_token=INFO.pad_token, multiple_of=8)
    assert rows["input_ids"].shape == (1, 8)
    assert rows["attention_mask"].sum() == 1
    assert set(rows["labels"].flatten().tolist()) == {-100}
    assert "pixel_values" not in rows

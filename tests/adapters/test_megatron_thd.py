"""The THD form in a real Megatron-Core GPT, packed against one document at a time, on one rank."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.tiny_models import (
    IMAGE,
    aligned_batch,
    assert_same_gradients,
    documents,
    empty_batch,
    gradients,
    mixed_batch,
    text_batch,
)
from torch import Tensor
from torch.nn import functional

from trainer_client.adapters.qwen_vl import mrope_positions
from trainer_client.device import normalize

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytestmark = pytest.mark.filterwarnings("ignore:::megatron.*")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it says that Apex and TransformerEngine are missing
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe.moe_utils import (
        compute_routing_scores_for_aux_loss,
        z_loss_func,
    )

    from trainer_client.adapters.megatron_thd import VisualInputs, packed_seq_params, thd_batch

ALIGN = 8
BATCHES = {"mixed": (mixed_batch, 1), "text only": (text_batch, 1), "aligned": (aligned_batch, 8)}


class ThdAttention(torch.nn.Module):
    """What TransformerEngine's attention does with PackedSeqParams, in a few lines for the CPU.

    `*_padded` say where a document stands, `cu_seqlens_*` how much of that is real; only real
    tokens are computed, the others give zeros.
    """

    def __init__(self, config: TransformerConfig, **_kwargs: Any) -> None:
        super().__init__()
        self.config = config

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: PackedSeqParams | None = None,
        **_kwargs: Any,
    ) -> Tensor:
        assert attention_mask is None
        if packed_seq_params is None:  # [T, 1, heads, width]
            return self.attend(query[:, 0], key[:, 0], value[:, 0]).flatten(1).unsqueeze(1)
        params = packed_seq_params
        assert params.qkv_format == "thd" and type(params.max_seqlen_q) is int
        assert torch.equal(params.cu_seqlens_q, params.cu_seqlens_kv)
        where = params.cu_seqlens_q_padded
        starts = (params.cu_seqlens_q if where is None else where)[:-1].tolist()
        lengths = params.cu_seqlens_q.diff().tolist()
        assert max(lengths) <= params.max_seqlen_q
        output = torch.zeros_like(query)
        for start, length in zip(starts, lengths, strict=True):
            own = slice(start, start + length)
            output[own] = self.attend(query[own], key[own], value[own])
        return output.flatten(1).unsqueeze(1)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        attended = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
        return attended.squeeze(0).transpose(0, 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GPTModel]:
    store = f"file://{tmp_path_factory.mktemp('megatron')}/rendezvous"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    patch = pytest.MonkeyPatch()
    # RoPE moves its frequencies to the current CUDA device, whatever the model is on
    patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    try:
        yield build_model()
    finally:
        patch.undo()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def build_model() -> GPTModel:
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.float64,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
    )
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = ThdAttention
    torch.manual_seed(0)
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=264,
        max_sequence_length=512,
        position_embedding_type="rope",
        parallel_output=False,
    ).double()


def token_losses(model: GPTModel, ids: Tensor, labels: Tensor, **packed: Any) -> Tensor:
    """[1, T]; `labels` are shifted already."""
    positions = packed.pop("position_ids", torch.arange(ids.shape[1]).unsqueeze(0))
    return model(ids, positions, None, labels=labels, **packed)


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("physical", [False, True])
def test_packed_loss_is_the_mean_of_separate_losses(
    model: GPTModel, name: str, physical: bool
) -> None:
    make, align = BATCHES[name]
    batch = make()
    made = thd_batch(batch, align=align)
    params = packed_seq_params(batch, align=align, physical=physical)
    losses = token_losses(
        model,
        made["tokens"],
        made["labels"],
        position_ids=made["position_ids"],
        packed_seq_params=params,
    )
    packed = (losses * made["loss_mask"]).sum() / made["loss_mask"].sum()
    separate: list[Tensor] = []
    for tokens, _ in documents(batch):
        labels = batch["labels"][tokens]
        shifted = functional.pad(labels[1:], (0, 1), value=-100).unsqueeze(0)
        own = token_losses(model, batch["input_ids"][tokens].unsqueeze(0), shifted)
        separate.append((own * (shifted != -100)).sum())
    assert len(separate) > 1
    mean = sum(separate) / (batch["labels"] != -100).sum()
    torch.testing.assert_close(packed, mean, rtol=1e-6, atol=0)  # RoPE and loss are in float32
    got, expected = gradients(model, packed), gradients(model, mean)
    assert_same_gradients(got, expected, share=1e-5)


def test_real_and_physical_bounds() -> None:
    batch = aligned_batch(ALIGN)
    params = packed_seq_params(batch, align=ALIGN)
    real, padded = params.cu_seqlens_q, params.cu_seqlens_q_padded
    assert real.dtype == padded.dtype == torch.int32
    assert real.diff().tolist() == batch["doc_lengths"].tolist()
    assert torch.equal(padded, batch["cu_seqlens"])
    assert params.cu_seqlens_kv is real and params.cu_seqlens_kv_padded is padded
    assert params.max_seqlen_q == params.max_seqlen_kv == int(padded.diff().max())
    assert not (padded % ALIGN).any()
    physical = packed_seq_params(batch, align=ALIGN, physical=True)
    assert torch.equal(physical.cu_seqlens_q, padded)
    plain = packed_seq_params(mixed_batch())
    assert plain.cu_seqlens_q_padded is plain.cu_seqlens_kv_padded is None


@pytest.mark.parametrize("name", BATCHES)
def test_tokens_of_the_batch(name: str) -> None:
    make, align = BATCHES[name]
    batch = make()
    made, length = thd_batch(batch, align=align), len(batch["input_ids"])
    for key, dtype in {
        "tokens": torch.int64,
        "labels": torch.int64,
        "loss_mask": torch.float32,
        "position_ids": torch.int64,
        "padding_mask": torch.bool,
    }.items():
        assert made[key].dtype == dtype and made[key].shape == (1, length)
    assert made["attention_mask"] is None and made["total_tokens"] == length
    assert made["max_seqlen_q"].dtype == torch.int32
    assert int(made["max_seqlen_q"]) == int(batch["cu_seqlens"].diff().max())
    assert ("cu_seqlens_q_padded" in made) == (align > 1)
    labels = made["labels"][0]
    for start, stop in itertools.pairwise(batch["cu_seqlens"].tolist()):
        assert made["position_ids"][0, start:stop].tolist() == list(range(stop - start))
        assert labels[stop - 1] == -100
        assert torch.equal(labels[start : stop - 1], batch["labels"][start + 1 : stop])
    assert torch.equal(made["loss_mask"][0] == 1, labels != -100)
    real = torch.cat([torch.arange(length)[tokens] for tokens, _ in documents(batch)])
    assert (~made["padding_mask"][0]).nonzero().flatten().tolist() == real.tolist()


def test_images_of_the_batch() -> None:
    batch = mixed_batch()
    made = thd_batch(batch, image_token=IMAGE, dtype=torch.float32)
    assert torch.equal(made["position_ids"], mrope_positions(batch, image_token=IMAGE)[:, None])
    visual = made["visual_inputs"]
    assert isinstance(visual, VisualInputs)
    assert vars(visual).keys() == {"pixel_values", "image_grid_thw"}
    assert torch.equal(visual.normalized_for_model()["pixel_values"], normalize(batch))
    assert torch.equal(visual.normalized_for_model()["image_grid_thw"], batch["image_grid_thw"])
    assert VisualInputs().normalized_for_model() == {}
    assert "visual_inputs" not in thd_batch(text_batch())


def test_moe_losses_leave_padding_out() -> None:
    """Megatron-Core's docstrings differ on what True means; its functions do not."""
    mask = thd_batch(aligned_batch(ALIGN), align=ALIGN)["padding_mask"][0]
    assert mask.any() and not mask.all()
    logits = torch.randn(len(mask), 4, dtype=torch.float64)
    torch.testing.assert_close(
        z_loss_func(logits, 1.0, padding_mask=mask), z_loss_func(logits[~mask], 1.0)
    )
    routes, scores = compute_routing_scores_for_aux_loss(logits, 2, "softmax", padding_mask=mask)
    assert not routes[mask].any() and not scores[mask].any()
    assert (routes[~mask].sum(dim=1) == 2).all()


def test_a_micro_batch_without_a_document(model: GPTModel) -> None:
    batch = empty_batch()
    made = thd_batch(batch)
    losses = token_losses(
        model, made["tokens"], made["labels"], packed_seq_params=packed_seq_params(batch)
    )
    assert (losses * made["loss_mask"]).sum() == 0
    assert made["padding_mask"].all()

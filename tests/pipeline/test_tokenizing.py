from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline.golden_text import cases

from dataservice.pipeline import tokenizing
from dataservice.pipeline.tokenizing import ByteTokenizer, FileTokenizer, Segment, Tokenizer

NEEDED = {"<|endoftext|>": "end_of_text"}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    cases.tokenizer().save(str(path))
    return str(path)


@pytest.fixture(scope="module")
def of_file(path: str) -> FileTokenizer:
    return FileTokenizer(path, NEEDED)


TEXTS = st.one_of(
    st.sampled_from(["assistant\n", "\n", "\n\nthe", " bus", "e\u0301", "<|im_end|>", "<think>"]),
    st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=30),
)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    texts = draw(st.lists(TEXTS, min_size=1, max_size=4))
    first = draw(st.booleans())
    return tuple((text, first ^ bool(number % 2)) for number, text in enumerate(texts))


@given(batch=st.lists(segments(), max_size=6))
@settings(max_examples=100, deadline=None)
def test_a_batch_has_the_tokens_of_whole_texts_and_loss_by_character(of_file, batch) -> None:
    plain = cases.tokenizer()
    plain.encode_special_tokens = True
    plain.post_processor = None  # would leave white space out of the offsets
    encoded = of_file.encode(batch)
    assert of_file.count(batch) == [found.lengths for found in encoded]
    for segment, found in zip(batch, encoded, strict=True):
        whole = plain.encode("".join(text for text, _ in segment), add_special_tokens=False)
        assert found.ids.tolist() == whole.ids
        assert sum(found.lengths) == len(whole)
        lossy = [loss for text, loss in segment for _ in text]
        wanted = [any(lossy[start:stop]) for start, stop in whole.offsets]
        losses = [
            loss
            for length, (_, loss) in zip(found.lengths, segment, strict=True)
            for _ in range(length)
        ]
        assert losses == wanted


@given(batch=st.lists(segments(), max_size=6))
@settings(max_examples=50, deadline=None)
def test_the_byte_tokenizer_keeps_every_byte(batch) -> None:
    tokenizer: Tokenizer = ByteTokenizer(["<|endoftext|>"])
    encoded = tokenizer.encode(batch)
    for segment, found in zip(batch, encoded, strict=True):
        assert bytes(found.ids.tolist()) == "".join(text for text, _ in segment).encode()
        assert found.lengths == tuple(len(text.encode()) for text, _ in segment)
    assert tokenizer.count(batch) == [found.lengths for found in encoded]
    assert tokenizer.decode([72, 256, 255]) == "H<|endoftext|>\ufffd"


def test_long_texts_are_encoded_in_chunks(of_file, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = [((f"{number} " + "word " * number, True),) for number in range(40)]
    whole = of_file.encode(batch)
    monkeypatch.setattr(tokenizing, "_CHUNK_CHARS", 100)
    for found, wanted in zip(of_file.encode(batch), whole, strict=True):
        assert found.ids.tolist() == wanted.ids.tolist()


def test_what_is_kept_of_short_texts_is_bounded(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizing, "_KEPT_SEGMENTS", 10)
    tokenizer = FileTokenizer(path, NEEDED)
    batch = [((str(number), False),) for number in range(35)]
    first = [found.ids.tolist() for found in tokenizer.encode(batch)]
    assert [found.ids.tolist() for found in tokenizer.encode(batch)] == first
    assert len(tokenizer._kept) <= 10


def test_no_threads_are_started(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    tokenizer = FileTokenizer(path, NEEDED)
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"
    before = len(os.listdir("/proc/self/task"))
    tokenizer.encode([((f"{number} word", True), ("more " * 50, False)) for number in range(200)])
    assert len(os.listdir("/proc/self/task")) == before
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    FileTokenizer(path, NEEDED)
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"


def test_a_forked_child_encodes(of_file) -> None:
    batch = [(("the bus " * 50, True),)] * 50
    of_file.encode(batch)
    child = os.fork()
    if not child:
        os._exit(0 if len(of_file.encode(batch)) == 50 else 1)
    timer = threading.Timer(20, os.kill, (child, 9))
    timer.start()
    _, status = os.waitpid(child, 0)
    timer.cancel()
    timer.join()
    assert status == 0


def test_special_tokens_are_those_of_the_file(of_file, tmp_path: Path) -> None:
    assert set(of_file.special) == set(cases.SPECIALS)
    assert of_file.alone
    ids = of_file.encode([(("<think><|im_end|>", True),)])[0].ids.tolist()
    vocabulary = cases.tokenizer().get_vocab()
    assert vocabulary["<think>"] in ids  # an added token that is none of the special ones
    assert vocabulary["<|im_end|>"] not in ids
    assert of_file.decode(ids) == "<think><|im_end|>"
    assert of_file.count_text("<think>") == 1

from __future__ import annotations

import functools
import json
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline.golden_text import cases

from dataservice.errors import ConfigError, RecordError
from dataservice.pipeline.text import Rendered, TextRenderer, TextSettings
from dataservice.pipeline.text_settings import BYTE_SPECIALS
from dataservice.storage.counting import Counted
from dataservice.storage.records import Record, Turn

TEMPLATES = ["plain", "chatml", "llama3"]
JINJA = [str(cases.FOLDER / f"{name}.jinja") for name in ("qwen_vl", "generation", "thinking")]


def stem(template: str) -> str:
    return Path(template).stem


CORPUS = ["The quick brown fox jumps over the lazy dog.", "im_start user assistant image pad end"]


def small_tokenizer(path: Path, *, special: bool = True, names=BYTE_SPECIALS) -> str:
    """A byte-level BPE of a few hundred tokens, with truncation and padding left on in the file."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([tokenizers.AddedToken(name, special=special) for name in names])
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(path))
    return str(path)


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return small_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


def turn(role: str, text: str) -> Turn:
    """With an image at each "<image>"."""
    return Turn(role=role, pieces=tuple(text.split("<image>")))  # type: ignore[arg-type]


def record(*turns: Turn, starts: tuple[int, ...] = (0,)) -> Record:
    images = tuple(f"{i}.jpg" for i in range(sum(len(t.pieces) - 1 for t in turns)))
    return Record(
        layout="llava", turns=turns, images=images, starts=starts, sizes=(None,) * len(images)
    )


TALK = record(
    turn("system", "Be brief."),
    turn("user", "<image>\nWhat is <image>?"),
    turn("assistant", "A bus."),
    turn("user", "Sure?"),
    turn("assistant", "Yes."),
)


def renderer(**options: str | None) -> TextRenderer:
    return TextRenderer.build(TextSettings(**options))  # type: ignore[arg-type]


@functools.cache
def built(tokenizer: str, template: str, loss: str) -> TextRenderer:
    return renderer(tokenizer=tokenizer, template=template, loss=loss)


def masked_text(text: TextRenderer, rec: Record, sizes: list[int]) -> str:
    """What carries loss, decoded, with a bar wherever it is interrupted."""
    rendered = text.render(rec, sizes)
    pieces, previous = [], False
    for token, loss in zip(rendered.ids.tolist(), rendered.loss.tolist(), strict=True):
        if loss and not previous and pieces:
            pieces.append("|")
        if loss:
            pieces.append(text.decode([token]))
        previous = loss
    return "".join(pieces)


def test_chatml_by_hand() -> None:
    text = renderer(template="chatml")
    rendered = text.render(TALK, [2, 1])
    assert text.decode(rendered.ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|image_pad|><|image_pad|><|vision_end|>\n"
        "What is <|vision_start|><|image_pad|><|vision_end|>?<|im_end|>\n"
        "<|im_start|>assistant\nA bus.<|im_end|>\n"
        "<|im_start|>user\nSure?<|im_end|>\n"
        "<|im_start|>assistant\nYes.<|im_end|>\n"
    )
    assert rendered.ids.dtype == np.int32
    assert masked_text(text, TALK, [2, 1]) == "A bus.<|im_end|>|Yes.<|im_end|>"
    assert (rendered.ids == text.image_token).sum() == 3


def test_plain_by_hand() -> None:
    text = renderer(template="plain")
    assert text.decode(text.render(TALK, [1, 1]).ids) == (
        "Be brief.\n"
        "<|vision_start|><|image_pad|><|vision_end|>\n"
        "What is <|vision_start|><|image_pad|><|vision_end|>?\n"
        "A bus.\nSure?\nYes.<|endoftext|>"
    )
    assert masked_text(text, TALK, [1, 1]) == "A bus.\n|Yes.<|endoftext|>"


def test_loss_on_all_text_leaves_out_images_and_the_first_token() -> None:
    text = renderer(template="chatml", loss="all")
    rec = record(turn("user", "a<image>b"), turn("assistant", "c"))
    assert masked_text(text, rec, [3]) == (
        "user\na|b<|im_end|>\n<|im_start|>assistant\nc<|im_end|>\n"
    )


def test_llama3_by_hand() -> None:
    text = renderer(template="llama3")
    rec = record(
        turn("system", " Be brief.\n"),
        turn("user", "\n<image> x <image> "),
        turn("assistant", " A "),
    )
    assert text.decode(text.render(rec, [1, 2]).ids) == (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n<|vision_start|><|image_pad|><|vision_end|> x "
        "<|vision_start|><|image_pad|><|image_pad|><|vision_end|><|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nA<|eot_id|>"
    )
    assert masked_text(text, rec, [1, 2]) == "A<|eot_id|>"
    plain = text.render(record(turn("text", " a ")), [])
    assert text.decode(plain.ids) == "<|begin_of_text|> a <|end_of_text|>"
    assert plain.loss.tolist() == [False, True, True, True, True]
    assert text.decode([text.pad_token]) == "<|end_of_text|>"


def test_tokens_of_texts_and_images_by_name() -> None:
    text = renderer(
        template="chatml",
        begin_of_text="<s>",
        end_of_text="</s>",
        image_token="<image>",
        image_start=None,
        image_end="</image>",
    )
    rec = record(turn("user", "a<image>b<image>"))
    assert text.decode(text.render(rec, [2, 1]).ids) == (
        "<|im_start|>user\na<image><image></image>b<image></image><|im_end|>\n"
    )
    counted = text.count(rec)
    assert counted.image_markup == 1
    assert counted.text_tokens + 3 == len(text.render(rec, [2, 1]).ids)
    assert text.decode(text.render(record(turn("text", "a")), []).ids) == "<s>a</s>"
    assert text.image_start is None
    none = renderer(template="plain", image_start=None, image_end=None)
    rec = record(turn("user", "<image>"), turn("assistant", "a"))
    rendered = none.render(rec, [2])
    assert none.count(rec) == Counted(
        text_tokens=3, loss_tokens=2, image_positions=(0,), image_markup=0
    )
    assert rendered.loss.tolist() == [False, False, False, True, True]


@pytest.mark.parametrize("template", ["plain", "chatml", JINJA[0]], ids=stem)
@pytest.mark.parametrize("loss", ["assistant", "all"])
def test_plain_text_is_the_same_in_every_template_and_always_carries_loss(template, loss) -> None:
    text = renderer(template=template, loss=loss)
    rendered = text.render(record(turn("text", "häh")), [])
    assert text.decode(rendered.ids) == "häh<|endoftext|>"
    assert rendered.loss.tolist() == [False, True, True, True, True]
    assert text.count(record(turn("text", ""))) == Counted(
        text_tokens=1, loss_tokens=0, image_positions=(), image_markup=2
    )


def test_byte_tokenizer_layout() -> None:
    text = renderer()
    assert (text.vocab_size, text.pad_token, text.image_token) == (267, 256, 261)
    assert text.render(record(turn("text", "A\x00é")), []).ids.tolist() == [65, 0, 195, 169, 256]


TEXTS = st.lists(
    st.one_of(
        st.sampled_from([*BYTE_SPECIALS, "<image", "image>", "\n", "<|", "|>", " user"]),
        st.text(st.characters(exclude_categories=("Cs",)), max_size=12),
    ),
    max_size=6,
).map("".join)
ROLES = st.sampled_from(["system", "user", "assistant", "tool"])


@st.composite
def records(draw: st.DrawFn) -> Record:
    """Of one document or several, some of text alone."""
    turns: list[Turn] = []
    starts = []
    chunks = st.lists(TEXTS, min_size=1, max_size=4).map("<image>".join)
    for _ in range(draw(st.integers(1, 3))):
        starts.append(len(turns))
        roles = st.just("text") if draw(st.booleans()) else ROLES
        turns += draw(st.lists(st.builds(turn, roles, chunks), min_size=1, max_size=3))
    return record(*turns, starts=tuple(starts))


def documents(rec: Record) -> list[Record]:
    """Each as a record of its own."""
    bounds = [*rec.starts, len(rec.turns)]
    return [record(*rec.turns[a:b]) for a, b in pairwise(bounds)]


@pytest.mark.parametrize("template", [*TEMPLATES, *JINJA], ids=stem)
@pytest.mark.parametrize("kind", ["bytes", "file"])
@given(
    loss=st.sampled_from(["assistant", "all"]),
    batch=st.lists(records(), min_size=1, max_size=3),
    data=st.data(),
)
@settings(max_examples=25, deadline=None)
def test_count_equals_render(kind, template, tokenizer_file, loss, batch, data) -> None:
    text = built("bytes" if kind == "bytes" else tokenizer_file, template, loss)
    sizes = [
        data.draw(st.lists(st.integers(1, 5), min_size=number, max_size=number))
        for number in (len(rec.images) for rec in batch)
    ]
    together = text.render_all(list(zip(batch, sizes, strict=True)))
    for rec, own, rendered, counted in zip(
        batch, sizes, together, text.count_all(batch), strict=True
    ):
        if isinstance(counted, RecordError):
            assert isinstance(rendered, RecordError)
            assert rendered.reason == counted.reason
            continue
        check_rendered(text, rendered, counted, own)
        alone = text.render(rec, own)
        assert (alone.ids == rendered.ids).all() and (alone.loss == rendered.loss).all()


def check_rendered(
    text: TextRenderer, rendered: Rendered, counted: Counted, sizes: list[int]
) -> None:
    assert counted.text_tokens + sum(sizes) == len(rendered.ids) == len(rendered.loss)
    assert counted.loss_tokens == rendered.loss.sum()
    assert counted.num_docs == len(rendered.starts)
    assert spans_of(counted, sizes) == spans_in(text, rendered.ids)
    assert not rendered.loss[list(rendered.starts)].any()
    assert (rendered.ids == text.image_token).sum() == sum(sizes)
    assert not rendered.loss[rendered.ids == text.image_token].any()
    assert 0 <= rendered.ids.min() and rendered.ids.max() < text.vocab_size


def spans_of(counted: Counted, sizes: list[int]) -> list[tuple[int, int]]:
    """(first token, end) of each image with its markup, as the index has them."""
    begins = [
        position + sum(sizes[:number]) for number, position in enumerate(counted.image_positions)
    ]
    ends = [b + size + counted.image_markup for b, size in zip(begins, sizes, strict=True)]
    return list(zip(begins, ends, strict=True))


def spans_in(text: TextRenderer, ids: np.ndarray) -> list[tuple[int, int]]:
    """The same, found in the tokens."""
    begins = np.flatnonzero(ids == text.special_tokens["<|vision_start|>"])
    ends = np.flatnonzero(ids == text.special_tokens["<|vision_end|>"]) + 1
    spans = list(zip(begins.tolist(), ends.tolist(), strict=True))
    assert all((ids[a + 1 : b - 1] == text.image_token).all() for a, b in spans)
    return spans


@pytest.mark.parametrize("kind", ["bytes", "file"])
@pytest.mark.parametrize("template", ["plain", "chatml"])
def test_positions_of_images_first_last_and_side_by_side(kind, template, tokenizer_file) -> None:
    text = renderer(tokenizer="bytes" if kind == "bytes" else tokenizer_file, template=template)
    turns = [("user", "<image><image>fox"), ("assistant", "<image>"), ("user", "dog<image>")]
    rec = record(*(turn(*said) for said in turns))
    sizes = [3, 1, 4, 2]
    counted = text.count(rec)
    spans = spans_of(counted, sizes)
    assert spans == spans_in(text, text.render(rec, sizes).ids)
    assert [b - a for a, b in spans] == [size + 2 for size in sizes]
    assert counted.image_positions[1] == counted.image_positions[0] + 2
    if template == "plain":
        assert counted.image_positions[0] == 0
        assert spans[-1][1] == len(text.render(rec, sizes).ids) - 1


@pytest.mark.parametrize("template", ["chatml", *JINJA[:2]], ids=stem)
@pytest.mark.parametrize("kind", ["bytes", "file"])
@given(rec=records())
@settings(max_examples=30, deadline=None)
def test_only_the_template_s_special_tokens_are_special(
    kind, template, tokenizer_file, rec
) -> None:
    text = built("bytes" if kind == "bytes" else tokenizer_file, template, "assistant")
    special_ids = set(text.special_tokens.values())
    ids = text.render(rec, [1] * len(rec.images)).ids.tolist()
    got, current = [], []
    for token in ids:
        if token in special_ids:
            got += [text.decode(current), token]
            current = []
        else:
            current.append(token)
    got.append(text.decode(current))
    assert got == expected(text, template, rec)


def expected(text: TextRenderer, template: str, rec: Record) -> list[str | int]:
    """Texts and special tokens, one after the other."""
    special = text.special_tokens
    image = [special[f"<|{name}|>"] for name in ("vision_start", "image_pad", "vision_end")]
    found: list[str | int] = [""]

    def add(*parts: str | int) -> None:
        for part in parts:
            if isinstance(part, int):
                found.extend([part, ""])
            else:
                found[-1] += part

    for document in documents(rec):
        if all(t.role == "text" for t in document.turns):
            for number, said in enumerate(document.turns):
                add("\n" * (number > 0), *said_parts(said, image))
            add(special["<|endoftext|>"])
            continue
        system = "qwen" in template and document.turns[0].role != "system"
        for said in [turn("system", "You are a helpful assistant.")] * system + [*document.turns]:
            add(special["<|im_start|>"], f"{said.role}\n", *said_parts(said, image))
            add(special["<|im_end|>"], "\n")
    return found


def said_parts(said: Turn, image: list[int]) -> list[str | int]:
    parts: list[str | int] = [said.pieces[0]]
    for piece in said.pieces[1:]:
        parts += [*image, piece]
    return parts


@pytest.mark.parametrize("template", [*TEMPLATES, *JINJA[:2]], ids=stem)
@given(loss=st.sampled_from(["assistant", "all"]), rec=records(), data=st.data())
@settings(max_examples=30, deadline=None)
def test_documents_are_rendered_as_if_alone(template, loss, rec, data) -> None:
    text = built("bytes", template, loss)
    number = len(rec.images)
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=number, max_size=number))
    whole, at = text.render(rec, sizes), 0
    alone = []
    for document in documents(rec):
        alone.append(text.render(document, sizes[at : at + len(document.images)]))
        at += len(document.images)
    assert whole.ids.tolist() == [token for part in alone for token in part.ids.tolist()]
    assert whole.loss.tolist() == [loss for part in alone for loss in part.loss.tolist()]
    lengths = [len(part.ids) for part in alone]
    assert whole.starts == tuple(accumulate(lengths[:-1], initial=0))
    docs = [doc for doc, part in enumerate(documents(rec)) for _ in part.images]
    assert whole.image_docs == tuple(docs)


def test_special_names_in_a_text_are_text(tokenizer_file) -> None:
    for name in ("bytes", tokenizer_file):
        text = renderer(tokenizer=name)
        rec = record(turn("text", "".join(BYTE_SPECIALS)))
        assert text.decode(text.render(rec, []).ids[:-1]) == "".join(BYTE_SPECIALS)
        ids = text.render(rec, []).ids
        assert ids[-1] == text.pad_token
        assert not set(ids[:-1].tolist()) & set(text.special_tokens.values())


def test_truncation_and_padding_of_the_file_are_switched_off(tokenizer_file) -> None:
    text = renderer(tokenizer=tokenizer_file)
    long = "fox " * 50
    assert text.decode(text.render(record(turn("text", long)), []).ids) == long + "<|endoftext|>"


def test_missing_special_tokens_are_named(tmp_path) -> None:
    path = small_tokenizer(tmp_path / "t.json", names=BYTE_SPECIALS[:4])
    named = r"has no <\|vision_end\|> \(image_end\), <\|image_pad\|> \(image_token\); name"
    with pytest.raises(ConfigError, match=named):
        renderer(tokenizer=path)
    with pytest.raises(ConfigError, match=r"has no <\|end_of_text\|> \(end_of_text\), <\|begin"):
        renderer(tokenizer=path, template="llama3")


def test_special_tokens_that_text_can_spell_are_refused(tmp_path) -> None:
    path = small_tokenizer(tmp_path / "t.json", special=False)
    with pytest.raises(ConfigError, match='mark it "special": true'):
        renderer(tokenizer=path)


def test_tokenizer_files_that_are_none(tmp_path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        renderer(tokenizer=str(tmp_path / "none.json"))
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"is not a tokenizer\.json"):
        renderer(tokenizer=str(tmp_path / "bad.json"))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"loss": "x"}, "loss: 'x'"),
        ({"template": "x"}, "template: 'x' cannot be read: No such file"),
        ({"image_start": "<a>", "image_token": "<a>"}, "must be different"),
        ({"end_of_text": "<|image_pad|>"}, "must be different"),
    ],
)
def test_settings_that_cannot_be_are_named(options, named) -> None:
    with pytest.raises(ConfigError, match=named):
        renderer(**options)


def test_wrong_number_of_images() -> None:
    rec = Record(layout="llava", turns=(turn("user", "<image>"),), images=())
    for call in (lambda t: t.count(rec), lambda t: t.render(rec, [])):
        with pytest.raises(RecordError, match="1 places in the text, but 0 images"):
            call(renderer())
    with pytest.raises(ValueError, match="1 sizes for 2 images"):
        renderer().render(TALK, [1])


def test_lone_surrogates_are_refused_alike(tokenizer_file) -> None:
    for name in ("bytes", tokenizer_file):
        with pytest.raises(RecordError, match="not valid Unicode"):
            renderer(tokenizer=name).count(record(turn("text", "\ud800")))


def test_fingerprint_covers_settings_and_content_but_not_the_place(tmp_path) -> None:
    first = small_tokenizer(tmp_path / "a.json")
    second = small_tokenizer(tmp_path / "b.json")
    changed = json.loads(Path(second).read_text())
    changed["truncation"] = None
    (tmp_path / "c.json").write_text(json.dumps(changed))
    same = renderer(tokenizer=first).fingerprint
    assert renderer(tokenizer=second).fingerprint == same
    others = [
        renderer(tokenizer=str(tmp_path / "c.json")),
        renderer(tokenizer=first, template="plain"),
        renderer(tokenizer=first, loss="all"),
        renderer(),
        renderer(image_start=None),
    ]
    assert len({same, *(other.fingerprint for other in others)}) == 6
    source = Path(JINJA[0]).read_text()
    for name, text in (("a", source), ("b", source), ("c", source + "x")):
        (tmp_path / f"{name}.jinja").write_text(text)
    a, b, c = (renderer(template=str(tmp_path / f"{n}.jinja")).fingerprint for n in "abc")
    assert a == b != c

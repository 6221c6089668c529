"""Turns a record into token ids and the mask that says which of them carry loss.

Invariants: `count` tells what `render` gives, for every record; what the data says is always
text, also where it spells a special token; an image is `<|vision_start|>`, one `<|image_pad|>` for
each image token, `<|vision_end|>`; the first token of a document never carries loss, nor does any
of the tokens of an image. Text between two special tokens is encoded by itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from dataservice.errors import ConfigError, RecordError
from dataservice.storage.counting import Counted
from dataservice.storage.records import Record

if TYPE_CHECKING:
    import tokenizers

RENDER_VERSION = 1
"""Part of the fingerprint: grows whenever the same record gives other tokens."""

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
IMAGE_START = "<|vision_start|>"
IMAGE_END = "<|vision_end|>"
IMAGE_PAD = "<|image_pad|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END, IMAGE_START, IMAGE_END, IMAGE_PAD)


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSettings:
    tokenizer: str = "bytes"
    """"bytes" (UTF-8 bytes are the tokens), or the path of a Hugging Face `tokenizer.json`."""
    template: Literal["plain", "chatml"] = "chatml"
    loss: Literal["assistant", "all"] = "assistant"
    """Which turns carry loss; plain text carries it in either case."""
    placeholder: str = "<image>"
    """Where an image stands in the text of a turn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """A whole document."""

    ids: NDArray[np.int32]
    loss: NDArray[np.bool_]
    """True where the token's label takes part in the loss."""


class Tokenizer(Protocol):
    """Text to ids; `special` has an id for each of SPECIAL_TOKENS, which no text encodes to."""

    special: dict[str, int]
    vocab_size: int
    fingerprint: str

    def encode(self, text: str) -> Sequence[int] | NDArray[np.int32]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class ByteTokenizer:
    """The 256 bytes, then SPECIAL_TOKENS; needs no file, loses nothing."""

    def __init__(self) -> None:
        self.special = {name: 256 + i for i, name in enumerate(SPECIAL_TOKENS)}
        self.vocab_size = 256 + len(SPECIAL_TOKENS)
        self.fingerprint = "bytes"
        self._pieces = [bytes([i]) for i in range(256)]
        self._pieces += [name.encode() for name in SPECIAL_TOKENS]

    def encode(self, text: str) -> NDArray[np.int32]:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self._pieces[i] for i in ids).decode(errors="replace")


class FileTokenizer:
    """A `tokenizer.json` of the Hugging Face `tokenizers` library."""

    def __init__(self, path: str) -> None:
        import tokenizers

        try:
            data = Path(path).read_bytes()
            self._tokenizer: tokenizers.Tokenizer = tokenizers.Tokenizer.from_buffer(data)
        except OSError as error:
            raise ConfigError(f"tokenizer: {path!r} cannot be read: {error.strerror}") from error
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(f"tokenizer: {path!r} is not a tokenizer.json: {error}") from error
        # Settings that a file may carry for inference; here they would cut or pad documents.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        missing = [name for name in SPECIAL_TOKENS if name not in vocabulary]
        if missing:
            raise ConfigError(
                f"tokenizer: {path!r} has no {', '.join(missing)}; "
                "add them to the tokenizer as special tokens"
            )
        self.special = {name: vocabulary[name] for name in SPECIAL_TOKENS}
        self.vocab_size = max(vocabulary.values()) + 1
        self.fingerprint = hashlib.sha256(data).hexdigest()
        for name, token in self.special.items():
            if token in self.encode(name):
                raise ConfigError(
                    f"tokenizer: {path!r} reads {name} in a text as the special token; "
                    'mark it "special": true there'
                )

    def encode(self, text: str) -> Sequence[int]:
        text.encode()  # the library's own error for lone surrogates is not a Unicode one
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


_IMAGE = -1
"""Stands for one image, markup and all, in the parts of a document."""
_IMAGE_MARKUP = 2
"""IMAGE_START and IMAGE_END."""
_Part = tuple["str | int", bool]
"""Text to encode, the id of a special token, or _IMAGE; and whether it carries loss."""


class TextRenderer:
    """Thread-safe; two renderers with the same fingerprint give the same tokens."""

    def __init__(self, settings: TextSettings, tokenizer: Tokenizer) -> None:
        if settings.template not in ("plain", "chatml"):
            raise ConfigError(f"template: {settings.template!r} is neither 'plain' nor 'chatml'")
        if settings.loss not in ("assistant", "all"):
            raise ConfigError(f"loss: {settings.loss!r} is neither 'assistant' nor 'all'")
        if not settings.placeholder:
            raise ConfigError("placeholder: is empty; give the text that stands for an image")
        self.settings = settings
        self._tokenizer = tokenizer
        self.special_tokens = special = tokenizer.special
        self.vocab_size = tokenizer.vocab_size
        self.pad_token = special[END_OF_TEXT]
        self.image_token = special[IMAGE_PAD]
        self.image_start, self.image_end = special[IMAGE_START], special[IMAGE_END]
        self._end_of_text = special[END_OF_TEXT]
        self._turn_start, self._turn_end = special[TURN_START], special[TURN_END]
        covered = {**asdict(settings), "tokenizer": tokenizer.fingerprint}
        text = json.dumps([RENDER_VERSION, covered], sort_keys=True)
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()

    @classmethod
    def build(cls, settings: TextSettings) -> TextRenderer:
        """Raises ConfigError for a tokenizer file that is missing or lacks a special token."""
        if settings.tokenizer == "bytes":
            return cls(settings, ByteTokenizer())
        return cls(settings, FileTokenizer(settings.tokenizer))

    def count(self, record: Record) -> Counted:
        """`storage.counting.RecordCounter`; raises RecordError as `render` does."""
        text_tokens = loss_tokens = 0
        positions: list[int] = []
        for what, loss in self._parts(record):
            if what == _IMAGE:
                positions.append(text_tokens)
                text_tokens += _IMAGE_MARKUP
                continue
            size = len(self._encode(what)) if isinstance(what, str) else 1
            loss_tokens += size if loss else 0
            if text_tokens == 0 and size and loss:
                loss_tokens -= 1
            text_tokens += size
        return Counted(
            text_tokens=text_tokens,
            loss_tokens=loss_tokens,
            image_positions=tuple(positions),
            image_markup=_IMAGE_MARKUP,
        )

    def render(self, record: Record, image_tokens: Sequence[int]) -> Rendered:
        """`image_tokens[i]` is the number of image tokens of the record's image i.

        Raises RecordError for text that is not valid Unicode, or with another number of
        placeholders than of images, ValueError for another number of sizes than of images.
        """
        if len(image_tokens) != len(record.images):
            raise ValueError(f"{len(image_tokens)} sizes for {len(record.images)} images")
        sizes = iter(image_tokens)
        pieces: list[NDArray[np.int32]] = []
        losses: list[NDArray[np.bool_]] = []
        for what, loss in self._parts(record):
            if isinstance(what, str):
                piece = np.asarray(self._encode(what), np.int32)
            elif what == _IMAGE:
                piece = np.full(next(sizes) + _IMAGE_MARKUP, self.image_token, np.int32)
                piece[0], piece[-1] = self.image_start, self.image_end
            else:
                piece = np.array([what], np.int32)
            pieces.append(piece)
            losses.append(np.full(len(piece), loss))
        ids, loss_mask = np.concatenate(pieces), np.concatenate(losses)
        loss_mask[0] = False
        return Rendered(ids=ids, loss=loss_mask)

    def decode(self, ids: Sequence[int] | NDArray[np.int32]) -> str:
        """The text of ids, special tokens by their names."""
        return self._tokenizer.decode([int(i) for i in ids])

    def _encode(self, text: str) -> Sequence[int] | NDArray[np.int32]:
        try:
            return self._tokenizer.encode(text)
        except UnicodeEncodeError as error:
            raise RecordError(f"text is not valid Unicode: {error}") from error

    def _parts(self, record: Record) -> Iterator[_Part]:
        found = sum(turn.text.count(self.settings.placeholder) for turn in record.turns)
        if found != len(record.images):
            raise RecordError(
                f"{found} placeholders {self.settings.placeholder!r} in the text, "
                f"but {len(record.images)} images"
            )
        if self.settings.template == "plain" or all(t.role == "text" for t in record.turns):
            yield from self._plain(record)
        else:
            yield from self._chatml(record)

    def _plain(self, record: Record) -> Iterator[_Part]:
        """Turns joined by a line feed, then the end of text; each is its turn's end token."""
        last = len(record.turns) - 1
        loss = False
        for number, turn in enumerate(record.turns):
            loss = self._carries_loss(turn.role)
            yield from self._text(turn.text, loss)
            if number < last:
                yield "\n", loss
        yield self._end_of_text, loss

    def _chatml(self, record: Record) -> Iterator[_Part]:
        everywhere = self.settings.loss == "all"
        for turn in record.turns:
            loss = self._carries_loss(turn.role)
            yield self._turn_start, everywhere
            yield f"{turn.role}\n", everywhere
            yield from self._text(turn.text, loss)
            yield self._turn_end, loss
            yield "\n", everywhere

    def _carries_loss(self, role: str) -> bool:
        return self.settings.loss == "all" or role in ("assistant", "text")

    def _text(self, text: str, loss: bool) -> Iterator[_Part]:
        for number, chunk in enumerate(text.split(self.settings.placeholder)):
            if number:
                yield _IMAGE, False
            if chunk:
                yield chunk, loss

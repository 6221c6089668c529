"""Turns a record into token ids and the mask that says which of them carry loss.

Invariants: `count` tells what `render` gives, for every record; what the data says is always
text, also where it spells a special token; an image is `<|vision_start|>`, one `<|image_pad|>` for
each image token, `<|vision_end|>`; each document of a record is rendered as if it were alone; the
first token of a document never carries loss, nor does any of the tokens of an image. Text between
two special tokens is encoded by itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from dataservice.errors import ConfigError, RecordError
from dataservice.storage.counting import Counted
from dataservice.storage.records import Record, Role, Turn

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """A whole record."""

    ids: NDArray[np.int32]
    loss: NDArray[np.bool_]
    """True where the token's label takes part in the loss."""
    starts: tuple[int, ...] = (0,)
    """The first token of each of its documents."""
    image_docs: tuple[int, ...] = ()
    """By image: the number of the document that it stands in."""


class Tokenizer(Protocol):
    """Text to ids; `special` has an id for each of SPECIAL_TOKENS, which no text encodes to."""

    special: dict[str, int]
    vocab_size: int
    fingerprint: str

    def encode(self, text: str) -> Sequence[int] | NDArray[np.int32]: ...

    def count(self, text: str) -> int:
        """The number of tokens that `encode` gives."""

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

    def count(self, text: str) -> int:
        return len(text) if text.isascii() else len(text.encode())

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

    def count(self, text: str) -> int:
        return len(self.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


_Ids = tuple[int, ...]
_IMAGE: _Ids = ()
"""Stands for one image, markup and all, in the parts of a document."""
_IMAGE_MARKUP = 2
"""IMAGE_START and IMAGE_END."""
_Part = tuple[str | _Ids, bool]
"""Text to encode, tokens, or _IMAGE; and whether it carries loss."""


class TextRenderer:
    """Thread-safe; two renderers with the same fingerprint give the same tokens."""

    def __init__(self, settings: TextSettings, tokenizer: Tokenizer) -> None:
        if settings.template not in ("plain", "chatml"):
            raise ConfigError(f"template: {settings.template!r} is neither 'plain' nor 'chatml'")
        if settings.loss not in ("assistant", "all"):
            raise ConfigError(f"loss: {settings.loss!r} is neither 'assistant' nor 'all'")
        self.settings = settings
        self._tokenizer = tokenizer
        self.special_tokens = special = tokenizer.special
        self.vocab_size = tokenizer.vocab_size
        self.pad_token = special[END_OF_TEXT]
        self.image_token = special[IMAGE_PAD]
        self.image_start, self.image_end = special[IMAGE_START], special[IMAGE_END]
        self._end_of_text = (special[END_OF_TEXT],)
        self._turn_end = (special[TURN_END],)
        self._line_feed = self._ids("\n")
        self._turn_heads = {
            role: (special[TURN_START], *self._ids(f"{role}\n")) for role in get_args(Role)
        }
        self._loss_everywhere = settings.loss == "all"
        self._chat = settings.template == "chatml"
        self._frames = {role: self._frame(role) for role in self._turn_heads}
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
        num_tokens = num_loss = 0
        positions: list[int] = []
        try:
            for turns in _documents(record):
                count = self._count_plain if self._is_plain(turns) else self._count_chatml
                num_tokens, loss = count(turns, num_tokens, positions)
                num_loss += loss
        except UnicodeEncodeError as error:
            raise _not_unicode(error) from error
        _check_images(len(positions), record)
        return Counted(
            text_tokens=num_tokens,
            loss_tokens=num_loss,
            image_positions=tuple(positions),
            image_markup=_IMAGE_MARKUP,
        )

    def render(self, record: Record, image_tokens: Sequence[int]) -> Rendered:
        """`image_tokens[i]` is the number of image tokens of the record's image i.

        Raises RecordError for text that is not valid Unicode, or with another number of places
        than of images, ValueError for another number of sizes than of images.
        """
        if len(image_tokens) != len(record.images):
            raise ValueError(f"{len(image_tokens)} sizes for {len(record.images)} images")
        _check_images(sum(len(turn.pieces) - 1 for turn in record.turns), record)
        sizes = iter(image_tokens)
        ids: list[NDArray[np.int32]] = []
        losses: list[NDArray[np.bool_]] = []
        image_docs: list[int] = []
        starts = [0]
        for number, turns in enumerate(_documents(record)):
            first = len(ids)
            for what, loss in self._parts(turns):
                if isinstance(what, str):
                    part = self._encode(what)
                elif what:
                    part = np.array(what, np.int32)
                else:
                    part = np.full(next(sizes) + _IMAGE_MARKUP, self.image_token, np.int32)
                    part[0], part[-1] = self.image_start, self.image_end
                    image_docs.append(number)
                ids.append(part)
                losses.append(np.full(len(part), loss))
            starts.append(starts[-1] + sum(map(len, ids[first:])))
        loss_mask = np.concatenate(losses)
        loss_mask[starts[:-1]] = False
        return Rendered(
            ids=np.concatenate(ids),
            loss=loss_mask,
            starts=tuple(starts[:-1]),
            image_docs=tuple(image_docs),
        )

    def decode(self, ids: Sequence[int] | NDArray[np.int32]) -> str:
        """The text of ids, special tokens by their names."""
        return self._tokenizer.decode([int(i) for i in ids])

    def _ids(self, text: str) -> _Ids:
        return tuple(int(token) for token in self._tokenizer.encode(text))

    def _encode(self, text: str) -> NDArray[np.int32]:
        try:
            return np.asarray(self._tokenizer.encode(text), np.int32)
        except UnicodeEncodeError as error:
            raise _not_unicode(error) from error

    def _frame(self, role: Role) -> tuple[int, int, int, bool]:
        """Tokens that ChatML puts before and behind a turn's content, and those of them with loss;
        whether the content has loss."""
        head, tail = len(self._turn_heads[role]), len(self._turn_end) + len(self._line_feed)
        loss = self._carries_loss(role)
        with_loss = head + tail if self._loss_everywhere else len(self._turn_end) * loss
        return head, tail, with_loss, loss

    def _count_chatml(
        self, turns: Sequence[Turn], num_tokens: int, positions: list[int]
    ) -> tuple[int, int]:
        """The tokens before and of a document, and those of the document that carry loss; adds the
        positions of its images. As `_chatml` has it, without making the parts."""
        count = self._tokenizer.count
        num_loss = -self._loss_everywhere  # the first token is a turn's head
        for turn in turns:
            head, tail, frame_loss, loss = self._frames[turn.role]
            pieces = turn.pieces
            begin = num_tokens = num_tokens + head
            for piece in pieces[:-1]:
                if piece:
                    num_tokens += count(piece)
                positions.append(num_tokens)
                num_tokens += _IMAGE_MARKUP
            if pieces[-1]:
                num_tokens += count(pieces[-1])
            if loss:
                num_loss += num_tokens - begin - _IMAGE_MARKUP * (len(pieces) - 1)
            num_tokens += tail
            num_loss += frame_loss
        return num_tokens, num_loss

    def _count_plain(
        self, turns: Sequence[Turn], num_tokens: int, positions: list[int]
    ) -> tuple[int, int]:
        """As `_count_chatml`."""
        num_loss, unseen = 0, True
        for what, loss in self._plain(turns):
            if isinstance(what, str):
                size = self._tokenizer.count(what)
            elif what:
                size = len(what)
            else:
                positions.append(num_tokens)
                size = _IMAGE_MARKUP
            num_tokens += size
            if loss:
                num_loss += size
            if unseen and size:
                unseen, num_loss = False, num_loss - loss
        return num_tokens, num_loss

    def _parts(self, turns: Sequence[Turn]) -> list[_Part]:
        """Of one document; never none."""
        return self._plain(turns) if self._is_plain(turns) else self._chatml(turns)

    def _is_plain(self, turns: Sequence[Turn]) -> bool:
        if self._chat:
            for turn in turns:
                if turn.role != "text":
                    return False
        return True

    def _plain(self, turns: Sequence[Turn]) -> list[_Part]:
        """Turns joined by a line feed, then the end of text; each is its turn's end token."""
        parts: list[_Part] = []
        loss = False
        for number, turn in enumerate(turns):
            if number:
                parts.append((self._line_feed, loss))
            loss = self._carries_loss(turn.role)
            _add_text(parts, turn.pieces, loss)
        parts.append((self._end_of_text, loss))
        return parts

    def _chatml(self, turns: Sequence[Turn]) -> list[_Part]:
        everywhere = self._loss_everywhere
        parts: list[_Part] = []
        for turn in turns:
            loss = self._carries_loss(turn.role)
            parts.append((self._turn_heads[turn.role], everywhere))
            _add_text(parts, turn.pieces, loss)
            parts.append((self._turn_end, loss))
            parts.append((self._line_feed, everywhere))
        return parts

    def _carries_loss(self, role: str) -> bool:
        return self._loss_everywhere or role in ("assistant", "text")


def _documents(record: Record) -> list[Sequence[Turn]]:
    """The turns of each."""
    if record.starts == (0,):
        return [record.turns]
    bounds = [*record.starts, len(record.turns)]
    return [record.turns[a:b] for a, b in pairwise(bounds)]


def _add_text(parts: list[_Part], pieces: Sequence[str], loss: bool) -> None:
    for number, piece in enumerate(pieces):
        if number:
            parts.append((_IMAGE, False))
        if piece:
            parts.append((piece, loss))


def _check_images(places: int, record: Record) -> None:
    if places != len(record.images):
        raise RecordError(f"{places} places in the text, but {len(record.images)} images")


def _not_unicode(error: UnicodeEncodeError) -> RecordError:
    return RecordError(f"text is not valid Unicode: {error}")

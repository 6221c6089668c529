"""Text to token ids, in batches.

Invariants: no text encodes to a special token; a segment is encoded as one text, however many runs
it has, and a token with a character of a run that carries loss carries loss; counts are those of
what `encode` gives. A tokenizer starts no thread: its callers are the threads, and it lets go of
the GIL while it encodes.
"""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from dataservice.errors import ConfigError

if TYPE_CHECKING:
    import tokenizers

_CHUNK_CHARS = 256 * 1024
"""Of text in one call of the library: its results take far more room than the ids."""
_KEPT_CHARS = 16
_KEPT_SEGMENTS = 4096
"""The short ones are what templates put between special tokens, the same ones again and again."""

Run = tuple[str, bool]
"""Text, and whether it carries loss."""
Segment = tuple[Run, ...]
"""Runs without anything between them; neighbours differ in loss."""


class Encoded(NamedTuple):
    """A segment."""

    ids: NDArray[np.int32]
    lengths: tuple[int, ...]
    """In tokens, of its runs: those before the first token with a character of the next run that
    carries loss, or of which no character belongs to this one that does."""


class Special(NamedTuple):
    """A special token."""

    id: int
    takes_left: bool = False
    """White space before it belongs to it, as in the library's `lstrip`."""
    takes_right: bool = False


class Tokenizer(Protocol):
    special: dict[str, Special]
    """By name; at least those that were asked for."""
    vocab_size: int
    fingerprint: str
    additive: bool
    """A text has the tokens of its parts, wherever it is divided."""
    alone: bool
    """A text that follows a special token has the tokens that it has by itself."""

    def encode(self, segments: Sequence[Segment]) -> list[Encoded]: ...

    def count(self, segments: Sequence[Segment]) -> list[tuple[int, ...]]:
        """`Encoded.lengths` of each."""

    def count_text(self, text: str) -> int: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class ByteTokenizer:
    """The 256 bytes, then special tokens; needs no file, loses nothing."""

    additive = alone = True

    def __init__(self, names: Sequence[str]) -> None:
        self.special = {name: Special(256 + i) for i, name in enumerate(names)}
        self.vocab_size = 256 + len(names)
        self.fingerprint = "bytes"
        self._pieces = [bytes([i]) for i in range(256)]
        self._pieces += [name.encode() for name in names]

    def encode(self, segments: Sequence[Segment]) -> list[Encoded]:
        encoded = []
        for segment in segments:
            parts = [text.encode() for text, _ in segment]
            ids = np.frombuffer(b"".join(parts), np.uint8).astype(np.int32)
            encoded.append(Encoded(ids, tuple(map(len, parts))))
        return encoded

    def count(self, segments: Sequence[Segment]) -> list[tuple[int, ...]]:
        return [tuple([self.count_text(text) for text, _ in segment]) for segment in segments]

    def count_text(self, text: str) -> int:
        return len(text) if text.isascii() else len(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self._pieces[i] for i in ids).decode(errors="replace")


class FileTokenizer:
    """A `tokenizer.json` of the Hugging Face `tokenizers` library."""

    additive = False

    def __init__(self, path: str, needed: Mapping[str, str]) -> None:
        """`needed`: names of special tokens, and what names them. Raises ConfigError for a file
        that is none, or that lacks one of them."""
        # Else each process would have a pool of as many threads as the machine has cores, which
        # a fork would leave locked. Who sets the variable has it as set.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        import tokenizers

        try:
            data = Path(path).read_bytes()
            self._tokenizer: tokenizers.Tokenizer = tokenizers.Tokenizer.from_buffer(data)
        except OSError as error:
            raise ConfigError(f"tokenizer: {path!r} cannot be read: {error.strerror}") from error
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(f"tokenizer: {path!r} is not a tokenizer.json: {error}") from error
        # Settings that a file may carry for inference: they cut or pad documents, add tokens, or
        # leave white space out of the offsets.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
        self.alone = self._encodes_alone(next(iter(needed)))
        self._tokenizer.encode_special_tokens = True
        self._fast = self._tokenizer.encode_batch_fast
        self._with_offsets = self._tokenizer.encode_batch
        self._reversible = (
            isinstance(self._tokenizer.decoder, tokenizers.decoders.ByteLevel)
            and getattr(self._tokenizer.model, "unk_token", None) is None
        )
        self._kept: dict[Segment, Encoded] = {}
        self.special = self._special_tokens(path, needed)
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.fingerprint = hashlib.sha256(data).hexdigest()

    def encode(self, segments: Sequence[Segment]) -> list[Encoded]:
        encoded = [self._kept.get(segment, _NONE) for segment in segments]
        missing = [number for number, found in enumerate(encoded) if found is _NONE]
        for number, encoding, lengths in self._encodings(segments, missing):
            encoded[number] = Encoded(np.array(encoding.ids, np.int32), lengths)
            self._keep(segments[number], encoded[number])
        return encoded

    def count(self, segments: Sequence[Segment]) -> list[tuple[int, ...]]:
        counts = [self._kept.get(segment, _NONE).lengths for segment in segments]
        missing = [number for number, found in enumerate(counts) if not found]
        for number, _, lengths in self._encodings(segments, missing):
            counts[number] = lengths
        return counts

    def count_text(self, text: str) -> int:
        return sum(self.count([((text, False),)])[0])

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def _encodings(
        self, segments: Sequence[Segment], numbers: Sequence[int]
    ) -> Iterator[tuple[int, tokenizers.Encoding, tuple[int, ...]]]:
        """Of some of the segments, in any order, with `Encoded.lengths`.

        Offsets take time: they are not made for a text that begins with the tokens of its first
        run, where ids tell characters.
        """
        quick: list[int] = []
        others: list[int] = []
        for number in numbers:
            segment = segments[number]
            headed = len(segment) == 2 and len(segment[0][0]) <= _KEPT_CHARS and self._reversible
            (quick if len(segment) == 1 or headed else others).append(number)
        for number, encoding in self._batches(self._fast, segments, quick):
            segment, size = segments[number], len(encoding)
            if len(segment) == 1:
                yield number, encoding, (size,)
                continue
            head = self.encode([segment[:1]])[0].ids.tolist()
            if encoding.ids[: len(head)] == head:
                yield number, encoding, (len(head), size - len(head))
            else:
                others.append(number)
        for number, encoding in self._batches(self._with_offsets, segments, others):
            yield number, encoding, _lengths(segments[number], encoding)

    @staticmethod
    def _batches(
        encode: Callable[..., list[tokenizers.Encoding]],
        segments: Sequence[Segment],
        numbers: Sequence[int],
    ) -> Iterator[tuple[int, tokenizers.Encoding]]:
        texts = ["".join([text for text, _ in segments[number]]) for number in numbers]
        for part in _chunks(texts):
            encodings = encode(texts[part], add_special_tokens=False)
            yield from zip(numbers[part], encodings, strict=True)

    def _keep(self, segment: Segment, encoded: Encoded) -> None:
        if len(segment) == 1 and len(segment[0][0]) <= _KEPT_CHARS:
            if len(self._kept) >= _KEPT_SEGMENTS:
                self._kept = {}
            self._kept[segment] = encoded

    def _encodes_alone(self, special: str) -> bool:
        def ids(text: str) -> list[int]:
            return self._tokenizer.encode(text, add_special_tokens=False).ids

        return ids(f"{special}a") == ids(special) + ids("a")

    def _special_tokens(self, path: str, needed: Mapping[str, str]) -> dict[str, Special]:
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if missing := [name for name in needed if name not in vocabulary]:
            raise ConfigError(
                f"tokenizer: {path!r} has no "
                + ", ".join(f"{name} ({needed[name]})" for name in missing)
                + "; name tokens that it has, or add these to it as special tokens"
            )
        special = {name: Special(vocabulary[name]) for name in needed}
        for token, added in self._tokenizer.get_added_tokens_decoder().items():
            if added.special and added.content:
                special[added.content] = Special(token, added.lstrip, added.rstrip)
        for name in needed:
            ids = self._tokenizer.encode(name, add_special_tokens=False).ids
            if special[name].id in ids:
                raise ConfigError(
                    f"tokenizer: {path!r} reads {name} in a text as the special token; "
                    'mark it "special": true there'
                )
        return special


_NONE = Encoded(np.zeros(0, np.int32), ())


def _chunks(texts: Sequence[str]) -> Iterator[slice]:
    """Of one text at least."""
    first = size = 0
    for number, text in enumerate(texts):
        if number > first and size + len(text) > _CHUNK_CHARS:
            yield slice(first, number)
            first, size = number, 0
        size += len(text)
    if texts:
        yield slice(first, len(texts))


def _lengths(segment: Segment, encoding: tokenizers.Encoding) -> tuple[int, ...]:
    """`Encoded.lengths`."""
    if len(segment) == 1:
        return (len(encoding),)
    offsets = encoding.offsets  # (first character, end) by token
    lengths = []
    done = stop = 0
    for (text, _), (_, loss) in pairwise(segment):
        stop += len(text)
        by_end = bisect_right(offsets, stop, key=itemgetter(1))
        bound = by_end if loss else bisect_left(offsets, stop, key=itemgetter(0))
        lengths.append(max(bound - done, 0))
        done = max(bound, done)
    return (*lengths, len(offsets) - done)

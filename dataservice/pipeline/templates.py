"""What turns become: the parts of a document, by the templates that need no file.

Invariants: a turn's text stands in its parts as it is, but for white space around it where the
template says so; the tokens that end an assistant's turn carry loss with it, what follows them and
what stands before the text does not, unless everything does; plain text carries loss in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, get_args

from dataservice.pipeline.markup import IMAGE, Ids, Markup, Part
from dataservice.storage.records import Role, Turn

END_OF_TEXT = "<|endoftext|>"
TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
LLAMA3_BEGIN, LLAMA3_END = "<|begin_of_text|>", "<|end_of_text|>"
LLAMA3_HEADER, LLAMA3_HEADER_END = "<|start_header_id|>", "<|end_header_id|>"
LLAMA3_TURN_END = "<|eot_id|>"


class Template(Protocol):
    def parts(self, turns: Sequence[Turn]) -> list[Part]:
        """Of one document; never none. Raises RecordError for turns that it does not allow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """The texts around the text of a turn."""

    special: tuple[str, ...]
    """The special tokens in them."""
    begin: str = ""
    """Before the first turn."""
    before: str
    """"{role}" is the turn's."""
    after: str
    """Ends with a special token, and perhaps text behind it."""
    strip: bool = False
    """White space around a turn's text is left out."""


FRAMES = {
    "chatml": Frame(
        special=(TURN_START, TURN_END),
        before=f"{TURN_START}{{role}}\n",
        after=f"{TURN_END}\n",
    ),
    "llama3": Frame(
        special=(LLAMA3_BEGIN, LLAMA3_HEADER, LLAMA3_HEADER_END, LLAMA3_TURN_END),
        begin=LLAMA3_BEGIN,
        before=f"{LLAMA3_HEADER}{{role}}{LLAMA3_HEADER_END}\n\n",
        after=LLAMA3_TURN_END,
        strip=True,
    ),
}


class PlainTemplate:
    """Turns joined by a line feed, between the tokens of a text; the line feed or token behind a
    turn is its own."""

    def __init__(self, begin: Ids, end: Ids, *, everywhere: bool) -> None:
        """`everywhere`: all turns carry loss, else the assistant's and plain text."""
        self._begin = begin
        self._end = end
        self._everywhere = everywhere

    def parts(self, turns: Sequence[Turn]) -> list[Part]:
        parts: list[Part] = [(self._begin, False)] if self._begin else []
        loss = False
        for number, turn in enumerate(turns):
            if number:
                parts.append(("\n", loss))
            loss = self._everywhere or carries_loss(turn.role)
            add_text(parts, turn.pieces, loss)
        parts.append((self._end, loss))
        return parts


class FramedTemplate:
    """Each turn in its frame."""

    def __init__(self, frame: Frame, markup: Markup, *, everywhere: bool) -> None:
        """`everywhere`: all of the document carries loss."""
        self._everywhere = everywhere
        self._strip = frame.strip
        self._begin = markup.parts(frame.begin, loss=everywhere)
        self._heads = {
            role: markup.parts(frame.before.format(role=role), loss=everywhere)
            for role in get_args(Role)
        }
        end = markup.last_special_end(frame.after)
        rest = markup.parts(frame.after[end:], loss=everywhere)
        self._tails = {
            role: markup.parts(frame.after[:end], loss=everywhere or carries_loss(role)) + rest
            for role in self._heads
        }

    def parts(self, turns: Sequence[Turn]) -> list[Part]:
        parts = list(self._begin)
        for turn in turns:
            parts += self._heads[turn.role]
            pieces = _stripped(turn.pieces) if self._strip else turn.pieces
            add_text(parts, pieces, self._everywhere or carries_loss(turn.role))
            parts += self._tails[turn.role]
        return parts

    def counter(self, count_text: Callable[[str], int], image_markup: int) -> QuickCounter:
        """Counts without making the parts; `count_text` is of a tokenizer that is additive."""

        def counts(parts: Sequence[Part]) -> tuple[int, int]:
            sizes = [
                (count_text(what) if isinstance(what, str) else len(what), loss)
                for what, loss in parts
            ]
            return sum(size for size, _ in sizes), sum(size for size, loss in sizes if loss)

        begin, begin_loss = counts(self._begin)
        frames = {}
        for role, head in self._heads.items():
            (before, before_loss), (after, after_loss) = counts(head), counts(self._tails[role])
            loss = self._everywhere or carries_loss(role)
            frames[role] = before, after, before_loss + after_loss, loss
        first_loss = begin_loss - self._everywhere  # the first token is of the frame
        strip = self._strip

        def count(turns: Sequence[Turn], num_tokens: int, positions: list[int]) -> tuple[int, int]:
            num_tokens, num_loss = num_tokens + begin, first_loss
            for turn in turns:
                before, after, frame_loss, loss = frames[turn.role]
                pieces = _stripped(turn.pieces) if strip else turn.pieces
                first = num_tokens = num_tokens + before
                for piece in pieces[:-1]:
                    if piece:
                        num_tokens += count_text(piece)
                    positions.append(num_tokens)
                    num_tokens += image_markup
                if pieces[-1]:
                    num_tokens += count_text(pieces[-1])
                if loss:
                    num_loss += num_tokens - first - image_markup * (len(pieces) - 1)
                num_tokens += after
                num_loss += frame_loss
            return num_tokens, num_loss

        return count


QuickCounter = Callable[[Sequence[Turn], int, list[int]], tuple[int, int]]
"""(turns of a document, the tokens before it, positions of images) -> the tokens before and of the
document, and those of it that carry loss; adds the positions of its images."""


def carries_loss(role: str) -> bool:
    return role in ("assistant", "text")


def add_text(parts: list[Part], pieces: Sequence[str], loss: bool) -> None:
    for number, piece in enumerate(pieces):
        if number:
            parts.append((IMAGE, False))
        if piece:
            parts.append((piece, loss))


def _stripped(pieces: Sequence[str]) -> Sequence[str]:
    """Without white space around the whole, whose ends may be images."""
    if len(pieces) == 1:
        return (pieces[0].strip(),)
    return (pieces[0].lstrip(), *pieces[1:-1], pieces[-1].rstrip())

"""Puts the images of a record between the pieces of its text.

Invariants: as many placeholders as listed images, or the record is refused with both numbers; the
one exception is the source's rule "front". A numbered placeholder takes the image of that number
(from 1), one without a number the next listed; each image stands in one place. Text parts of a turn
join without a seam.
"""

from __future__ import annotations

from collections.abc import Sequence

from dataservice.errors import RecordError
from dataservice.storage.records.fields import placeholder_pattern
from dataservice.storage.records.layouts import Draft, Slot
from dataservice.storage.records.model import MAX_IMAGES, Role, Turn
from dataservice.storage.sources import Mismatch

_Wanted = int | str | None
"""An image of the text: its number in the list, its name, or None for the next in the list."""
_Split = list[tuple[Role, list[str]]]

Order = Sequence[int | None] | None
"""By image, its number among the listed ones; None for one that was not listed. None instead of
all: the images are in the order in which they were written."""


class Placer:
    """Thread-safe."""

    def __init__(self, placeholders: tuple[str, ...], mismatch: Mismatch) -> None:
        self._pattern, self._numbered = placeholder_pattern(placeholders)
        self._front = mismatch == "front"
        self._single = placeholders[0] if len(placeholders) == 1 and not self._numbered else None
        self._called = " or ".join(repr(text) for text in placeholders) or "(none is set)"

    def place(self, draft: Draft) -> tuple[list[Turn], Sequence[str], Order]:
        """Turns, images and where those were written; raises RecordError."""
        if (turns := self._simply(draft)) is not None:
            return turns, draft.listed, None
        wanted: list[_Wanted] = []
        split: _Split = []
        for role, content in draft.turns:
            parts = [content] if isinstance(content, str) else content
            split.append((role, self._join(parts, draft.literal, wanted)))
        listed = draft.listed
        if listed and not wanted and (draft.front or (self._front and len(listed) == 1)):
            _put_in_front(split, len(listed))
            wanted += [None] * len(listed)
        if len(wanted) > MAX_IMAGES:
            raise RecordError(f"{len(wanted)} images, more than {MAX_IMAGES}")
        turns = [Turn(role=role, pieces=tuple(pieces)) for role, pieces in split]
        return turns, *self._order(wanted, listed)

    def _simply(self, draft: Draft) -> list[Turn] | None:
        """The turns of the usual record: plain texts with one placeholder for each listed image, or
        with all of them in front. A third of the time of the general way."""
        if self._single is None:
            return None
        turns: list[Turn] = []
        places, num_images = 0, len(draft.listed)
        for role, content in draft.turns:
            if type(content) is not str:
                return None
            pieces = content.split(self._single)
            places += len(pieces) - 1
            turns.append(Turn(role=role, pieces=tuple(pieces)))
        if places == 0 and num_images and draft.front:
            turns[0] = Turn(role=turns[0].role, pieces=("",) * num_images + turns[0].pieces)
            places = num_images
        return turns if places == num_images <= MAX_IMAGES else None

    def _join(self, parts: Sequence[str | Slot], literal: bool, wanted: list[_Wanted]) -> list[str]:
        """The pieces of a turn; what it wants is added to `wanted`."""
        pieces: list[str] = []
        open_piece: list[str] = []
        for part in parts:
            if isinstance(part, Slot):
                wanted.append(part.name)
                pieces.append("".join(open_piece))
                open_piece.clear()
            elif literal or (self._single is not None and self._single not in part):
                open_piece.append(part)
            else:
                start = 0
                for match in self._pattern.finditer(part):
                    open_piece.append(part[start : match.start()])
                    pieces.append("".join(open_piece))
                    open_piece.clear()
                    wanted.append(_number(match[match.lastindex]) if match.lastindex else None)
                    start = match.end()
                open_piece.append(part[start:])
        return [*pieces, "".join(open_piece)]

    def _order(self, wanted: list[_Wanted], listed: list[str]) -> tuple[Sequence[str], Order]:
        named = [want for want in wanted if isinstance(want, str)]
        places = len(wanted) - len(named)
        if places != len(listed):
            one_in_front = not wanted and len(listed) == 1
            remedy = "; `mismatch: front` of the source puts it in front" if one_in_front else ""
            raise RecordError(
                f"{_count(places, 'placeholder')} {self._called}, "
                f"{_count(len(listed), 'image')}{remedy}"
            )
        if not places:
            return named, None
        if not named and not self._numbered:
            return listed, None
        following = iter(range(len(listed)))
        order = [next(following) if want is None else want for want in wanted]
        _check_numbers([number for number in order if isinstance(number, int)], len(listed))
        names = [listed[want] if isinstance(want, int) else want for want in order]
        return names, [want if isinstance(want, int) else None for want in order]


def _put_in_front(split: _Split, number: int) -> None:
    """Of the first turn of the user, or of the first."""
    first = next((i for i, (role, _) in enumerate(split) if role == "user"), 0)
    split[first][1][:0] = [""] * number


def _number(digits: str) -> int:
    return int(digits) - 1 if len(digits) < 10 else 10**9


def _check_numbers(numbers: list[int], num_images: int) -> None:
    seen: set[int] = set()
    for number in numbers:
        if not 0 <= number < num_images:
            raise RecordError(
                f"a placeholder has the number {number + 1}, "
                f"but images are numbered from 1 to {num_images}"
            )
        if number in seen:
            raise RecordError(f"image {number + 1} has two placeholders")
        seen.add(number)


def _count(number: int, word: str) -> str:
    return f"{number or 'no'} {word}{'' if number == 1 else 's'}"

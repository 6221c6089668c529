"""Special tokens in a rendered text, told apart from what a user's text merely spells.

Invariants: `guard` takes every special token and mark out of a text, and `parts` puts the very text
back; so whatever is special in a rendered text comes from the template. An image is one part,
start, token and end side by side, and carries no loss.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from dataservice.errors import RecordError
from dataservice.pipeline.tokenizing import Special

Ids = tuple[int, ...]
IMAGE: Ids = ()
"""Stands for one image, markup and all, in the parts of a document."""
Part = tuple[str | Ids, bool]
"""Text to encode, tokens, or IMAGE; and whether it carries loss."""

# Unicode's own noncharacters, "for internal use"; a text that has them all the same is guarded.
_ESCAPE, LOSS_BEGIN, LOSS_END = "\ufdd0", "\ufdd1", "\ufdd2"
_FIRST_CODE = 0xF0000
_GUARDED = re.compile(f"{_ESCAPE}(.)", re.DOTALL)
# White space as the tokenizers library has it.
_LEFT_SPACE = re.compile(r"^[^\S\x1c-\x1f]+")
_RIGHT_SPACE = re.compile(r"[^\S\x1c-\x1f]+$")


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageTokens:
    """By name; of an image: `start` where there is one, `token` for each of its image tokens,
    `end`."""

    token: str
    start: str | None
    end: str | None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in (self.start, self.token, self.end) if name is not None)


class Markup:
    """Thread-safe."""

    def __init__(self, special: Mapping[str, Special], image: ImageTokens) -> None:
        self._special = special
        self.image = image
        self._image_id = special[image.token].id
        self._image_ids = [special[name].id for name in image.names]
        names = sorted(special, key=len, reverse=True)  # of several at one place the longest
        kept = [LOSS_BEGIN, LOSS_END, *names]
        self._delimiter = re.compile(f"({'|'.join(map(re.escape, kept))})")
        self._to_guard = re.compile("|".join(map(re.escape, [_ESCAPE, *kept])))
        self._texts = [_ESCAPE, *kept]
        self._codes = {text: chr(_FIRST_CODE + code) for code, text in enumerate(self._texts)}

    def guard(self, text: str) -> str:
        return self._to_guard.sub(lambda match: _ESCAPE + self._codes[match[0]], text)

    def unguard(self, text: str) -> str:
        if _ESCAPE not in text:
            return text
        return _GUARDED.sub(self._unguarded, text)

    def next_special(self, text: str, start: int = 0) -> str | None:
        """The first special token of a rendered text from `start` on."""
        match = self._delimiter.search(text, start)
        return None if match is None else match[0]

    def last_special_end(self, text: str) -> int:
        """The end of the last special token in a rendered text, of the text where it has none."""
        end = len(text)
        for match in self._delimiter.finditer(text):
            end = match.end()
        return end

    def parts(self, rendered: str, *, loss: bool | None = None) -> list[Part]:
        """`loss`: of all of it; None: where it is between LOSS_BEGIN and LOSS_END.

        Raises RecordError for an image token without its start or end.
        """
        parts: list[Part] = []
        lossy = bool(loss)
        cut = False
        for number, chunk in enumerate(self._delimiter.split(rendered)):
            if number % 2 == 0:
                text = _LEFT_SPACE.sub("", chunk) if cut else chunk
                if text:
                    parts.append((self.unguard(text), lossy))
                    cut = False
            elif chunk in (LOSS_BEGIN, LOSS_END):
                lossy = chunk == LOSS_BEGIN if loss is None else loss
            else:
                token = self._special[chunk]
                if token.takes_left:
                    _strip_right(parts)
                parts.append(((token.id,), lossy))
                cut = token.takes_right
        return self._with_images(parts)

    def _unguarded(self, match: re.Match[str]) -> str:
        code = ord(match[1]) - _FIRST_CODE
        if not 0 <= code < len(self._texts):
            raise RecordError("the template takes the name of a special token in a text apart")
        return self._texts[code]

    def _with_images(self, parts: list[Part]) -> list[Part]:
        token, unit = (self._image_id,), [(part,) for part in self._image_ids]
        if not any(what == token for what, _ in parts):
            return parts
        found: list[Part] = []
        waiting = iter(range(len(parts)))
        for i in waiting:
            if [what for what, _ in parts[i : i + len(unit)]] == unit:
                found.append((IMAGE, False))
                for _ in unit[1:]:
                    next(waiting)
            elif parts[i][0] == token:
                raise RecordError(
                    f"the template puts {self.image.token} elsewhere than in "
                    f"{''.join(self.image.names)}"
                )
            else:
                found.append(parts[i])
        return found


def _strip_right(parts: list[Part]) -> None:
    """Takes the white space off the end of the parts."""
    while parts and isinstance(parts[-1][0], str):
        text, loss = parts.pop()
        assert isinstance(text, str)
        if kept := _RIGHT_SPACE.sub("", text):
            parts.append((kept, loss))
            return

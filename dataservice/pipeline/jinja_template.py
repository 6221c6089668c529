"""A model's own chat template: where in its rendering the texts, images and answers are.

Invariants: the template neither changes nor leaves out the text of a user's or an assistant's turn,
but for white space around it, else it is refused before the first record. Where a template looks
into a text (earlier reasoning that it leaves out, say), what it makes of that is what
`transformers` shows the model. An assistant's turn carries loss from where a generation prompt
would end to the special token that ends the turn, or where the template has {% generation %}.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from dataservice.errors import ConfigError, RecordError
from dataservice.pipeline.chat_rendering import Message, Rendering
from dataservice.pipeline.markup import IMAGE, LOSS_BEGIN, LOSS_END, Markup, Part
from dataservice.pipeline.template_files import TemplateFile
from dataservice.storage.records import Role, Turn

_SHOWN_CHARS = 200


class JinjaTemplate:
    """`templates.Template`."""

    def __init__(self, file: TemplateFile, markup: Markup, *, everywhere: bool) -> None:
        """`everywhere`: all of a document carries loss. Raises ConfigError for a template that is
        none, or in which texts, images or answers cannot be told."""
        self._rendering = Rendering(file, markup)
        self._markup = markup
        self._everywhere = everywhere
        self._lists = self._items = False
        self._marks = False
        self._prompt = ""
        self._turn_end = re.compile("(?!)")
        try:
            self._lists = self._find_lists()
            self._items = self._find_items()
            self._silent = self._find_silent()
            if not everywhere:
                self._find_answers()
        except RecordError as error:
            raise ConfigError(f"tokenizer.template: {file.path!r}: {error.reason}") from error

    def parts(self, turns: Sequence[Turn]) -> list[Part]:
        for turn in turns:
            if turn.role == "text":
                raise RecordError("plain text among turns, for which the template has no place")
            if turn.role in self._silent:
                raise RecordError(f"the template changes or leaves out what the {turn.role} says")
        messages = self._messages(turns)
        text = self._rendering.render(messages)
        if self._everywhere:
            parts = self._markup.parts(text, loss=True)
        else:
            parts = self._markup.parts(text if self._marks else self._marked(text, messages))
        images = sum(len(turn.pieces) - 1 for turn in turns)
        if (found := sum(what == IMAGE for what, _ in parts)) != images:
            raise RecordError(f"the template puts {found} images where there are {images}")
        if not parts:
            raise RecordError("the template writes nothing")
        return parts

    # ---- where answers are -----------------------------------------------------------------------

    def _marked(self, text: str, messages: Sequence[Message]) -> str:
        """With LOSS_BEGIN and LOSS_END around what the assistant says."""
        marked, done = [], 0
        for start in self._answers(text, messages):
            match = self._turn_end.search(text, start)
            if match is None or start < done:
                raise RecordError("the template does not end an assistant's turn as in other talks")
            marked += [text[done:start], LOSS_BEGIN, text[start : match.end()], LOSS_END]
            done = match.end()
        return "".join([*marked, text[done:]])

    def _answers(self, text: str, messages: Sequence[Message]) -> list[int]:
        """Where each begins."""
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        prompt = self._prompt
        if self._markup.next_special(prompt) is not None:
            starts = [match.end() for match in re.finditer(re.escape(prompt), text)]
            if len(starts) == len(turns):
                return starts
        return [self._answer_by_prefix(text, messages[:i]) for i in turns]

    def _answer_by_prefix(self, text: str, before: Sequence[Message]) -> int:
        if not before:
            at, end = text.find(self._prompt), len(self._prompt)
            begin = at + end if at >= 0 else -1
        else:
            end = len(self._rendering.render(before))
            begin = _common_start(text, self._rendering.render(before, prompt=True))
        if begin < end:
            raise RecordError(
                "the template writes turns otherwise once others follow, so what an assistant's "
                "turn adds cannot be told; put {% generation %} around it, or use loss: all"
            )
        return begin

    # ---- what the template does, found by talks made up ------------------------------------------

    def _messages(self, turns: Sequence[Turn]) -> list[Message]:
        message = self._rendering.message
        return [message(turn, lists=self._lists, items=self._items) for turn in turns]

    def _lost(self, turns: Sequence[Turn]) -> Turn | None:
        """The first turn whose text the template changes or leaves out. Raises RecordError."""
        text, at = self._rendering.render(self._messages(turns)), 0
        for turn in turns:
            for piece in turn.pieces:
                wanted = self._markup.guard(piece)
                at = text.find(wanted, at)
                if at < 0:
                    return turn
                at += len(wanted)
        return None

    def _find_lists(self) -> bool:
        """Whether a text has to be an item of a list."""
        failed: list[RecordError] = []
        for lists in (False, True):
            self._lists = lists
            try:
                lost = self._lost(_TALK)
                if lost is None:
                    return lists
                raise RecordError(f"the template changes or leaves out what the {lost.role} says")
            except RecordError as error:
                failed.append(error)
        raise failed[0]

    def _find_items(self) -> bool:
        """Whether the template has places for images; else their tokens stand in the text."""
        self._items = True
        with_image = [_turn("user", 0, images=1), _TALK[1]]
        without = [Turn(role="user", pieces=("".join(with_image[0].pieces),)), _TALK[1]]
        try:
            if self._lost(with_image) is not None:
                return False
            text = self._rendering.render(self._messages(with_image))
        except RecordError:
            return False
        if sum(what == IMAGE for what, _ in self._markup.parts(text)) == 1:
            return True
        if text == self._rendering.render(self._messages(without)):
            return False
        raise RecordError(
            f"the template does not write an image as {''.join(self._markup.image.names)}, which "
            "tokenizer.image_start, image_token and image_end name, a turn with an image is "
            f"{self._shown(self._rendering.render(self._messages(with_image[:1])))}"
        )

    def _find_silent(self) -> frozenset[str]:
        """Roles besides user and assistant of whose turns the template leaves out the text. One
        that it refuses is refused with the record."""
        silent = set()
        for role, turns in _OTHERS.items():
            try:
                if self._lost(turns) is not None:
                    silent.add(role)
            except RecordError:
                continue
        return frozenset(silent)

    def _find_answers(self) -> None:
        """How the template marks what the assistant says."""
        messages = self._messages(_TALK)
        text = self._rendering.render(messages)
        self._marks = LOSS_BEGIN in text
        if not self._marks:
            asked = self._rendering.render(messages[:1])
            prompted = self._rendering.render(messages[:1], prompt=True)
            if prompted.startswith(asked):
                self._prompt = prompted[len(asked) :]
            ends = {self._special_after(text, message) for message in messages[1::2]}
            self._turn_end = re.compile("|".join(map(re.escape, ends)))
            text = self._marked(text, messages)
        said = "".join(
            [what for what, loss in self._markup.parts(text) if loss and isinstance(what, str)]
        )
        answers = [turn.pieces[0] for turn in _TALK[1::2]]
        questions = [turn.pieces[0] for turn in _TALK[::2]]
        if (
            not all(answer in said for answer in answers)
            or any(question in said for question in questions)
            or not (self._marks or self._prompt or said.lstrip().startswith(answers[0]))
        ):
            raise RecordError(
                "what the assistant says cannot be told from the rest: put {% generation %} and "
                "{% endgeneration %} around that and nothing else, or use loss: all"
            )

    def _special_after(self, text: str, message: Message) -> str:
        """The special token that ends a turn of _TALK."""
        content = message["content"]
        said = content if isinstance(content, str) else content[0]["text"]
        found = self._markup.next_special(text, text.index(said) + len(said))
        if found is None:
            raise RecordError(
                "no special token ends an assistant's turn: put {% generation %} and "
                "{% endgeneration %} around what it says, or use loss: all"
            )
        return found

    @staticmethod
    def _shown(text: str) -> str:
        return repr(text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}...")


def _common_start(a: str, b: str) -> int:
    """The number of characters that they begin with alike."""
    if a.startswith(b):
        return len(b)
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def _turn(role: Role, number: int, *, images: int = 0) -> Turn:
    """One whose text a template that quotes, cuts or folds it would change."""
    pieces = [
        f"<b>\"Tu\u0308k\" &amp; 'n\u00b0 {number}.{part}'</b>\n\n  {role}"
        for part in range(images + 1)
    ]
    return Turn(role=role, pieces=tuple(pieces))


_TALK: list[Turn] = [
    _turn("user", 0),
    _turn("assistant", 1),
    _turn("user", 2),
    _turn("assistant", 3),
]
_OTHERS: dict[Role, list[Turn]] = {
    "system": [_turn("system", 4), *_TALK],
    "tool": [*_TALK, _turn("tool", 4), _turn("assistant", 5)],
}

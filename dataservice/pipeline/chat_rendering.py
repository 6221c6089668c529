"""Renders turns by a Jinja chat template, as `transformers` does.

Invariants: the result is the same on every machine and day; what a text spells is guarded, so each
special token and mark in the result comes from the template; a template that fails is a
RecordError, one that is none a ConfigError.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dataservice.errors import ConfigError, RecordError
from dataservice.pipeline.markup import LOSS_BEGIN, LOSS_END, Markup
from dataservice.pipeline.template_files import TemplateFile
from dataservice.storage.records import Turn

Message = dict[str, Any]

_SHOWN_CHARS = 200


class Rendering:
    """Thread-safe."""

    def __init__(self, file: TemplateFile, markup: Markup) -> None:
        self._variables = dict(file.variables)
        self._markup = markup
        self._image = "".join(markup.image.names)
        try:
            self._template = _environment().from_string(file.source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"tokenizer.template: {file.path!r} is not a Jinja template that can be used: "
                f"line {error.lineno}: {error.message}"
            ) from error

    def render(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        """`prompt`: with the beginning of the assistant's next turn."""
        try:
            return self._template.render(
                **self._variables,
                messages=list(messages),
                tools=None,
                documents=None,
                add_generation_prompt=prompt,
            )
        except Exception as error:  # a template can raise anything
            raise RecordError(_reason(error)) from error

    def message(self, turn: Turn, *, lists: bool, items: bool) -> Message:
        """`lists`: a text is an item of a list; `items`: so is an image, else it is its tokens in
        the text."""
        pieces = [self._markup.guard(piece) for piece in turn.pieces]
        content: str | list[dict[str, str]]
        if items and len(pieces) > 1:
            content = []
            for number, piece in enumerate(pieces):
                if number:
                    content.append({"type": "image"})
                if piece:
                    content.append({"type": "text", "text": piece})
        else:
            content = self._image.join(pieces)
            if lists:
                content = [{"type": "text", "text": content}]
        return {"role": turn.role, "content": content}


class _Generation(Extension):
    """`{% generation %}` ... `{% endgeneration %}`: what the model is to say."""

    tags = {"generation"}  # noqa: RUF012 as jinja2 has it

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    @staticmethod
    def _marked(caller: Any) -> str:
        return f"{LOSS_BEGIN}{caller()}{LOSS_END}"


def _environment() -> ImmutableSandboxedEnvironment:
    """The flags, extensions and functions of `transformers`, but for those that give another
    result each time: strftime_now is not defined, as templates ask before they call it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    del environment.filters["random"], environment.globals["lipsum"]
    return environment


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _reason(error: Exception) -> str:
    reason = str(error) or type(error).__name__
    if "strftime_now" in reason:
        return (
            "the template asks for today's date (strftime_now), with which tokens would change "
            "by the day; write the date into a copy of the template"
        )
    return f"the template refuses the turns: {reason[:_SHOWN_CHARS]}"

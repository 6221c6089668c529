"""dataservice.wire.messages: every message and the pack spec can travel."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

import pytest

from dataservice.core.packspec import PackSpec
from dataservice.wire import counting, messages
from dataservice.wire.schema import decode, encode

CLASSES = [
    value
    for value in {**vars(messages), **vars(counting)}.values()
    if isinstance(value, type) and dataclasses.is_dataclass(value)
]


def example(hint: Any) -> Any:
    """A value of a field's type, with one element in every container."""
    scalars = {bool: True, int: 5, float: 1.5, str: "text", bytes: b"bytes"}
    if hint in scalars:
        return scalars[hint]
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        names = [field.name for field in dataclasses.fields(hint)]
        return typing.cast(Any, hint)(**{name: example(hints[name]) for name in names})
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        return (example(arguments[0]),)
    if typing.get_origin(hint) is dict:
        return {"key": example(arguments[1])}
    assert typing.get_origin(hint) is types.UnionType
    return example(arguments[0])


@pytest.mark.parametrize("cls", [*CLASSES, PackSpec], ids=lambda cls: cls.__name__)
def test_every_message_makes_the_round_trip(cls: type) -> None:
    message = example(cls)
    assert decode(cls, encode(message)) == message


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_messages_are_frozen_keyword_only_and_slotted(cls: Any) -> None:
    assert cls.__dataclass_params__.frozen
    assert all(field.kw_only for field in dataclasses.fields(cls))
    assert "__slots__" in vars(cls)


def test_a_request_type_names_its_method() -> None:
    requests = [request for request, _ in messages.COORDINATOR_METHODS.values()]
    assert len(set(requests)) == len(requests) == 15

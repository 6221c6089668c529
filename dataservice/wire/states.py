"""Saved states: their seal, and where they stand inside of what trainers save.

Invariants: a state that is changed in any of its values no longer has the seal of it, which is no
secret; only what is a whole state counts, wherever it stands; nothing else is looked at.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

from dataservice.errors import WireError
from dataservice.wire.messages import ResumeState
from dataservice.wire.schema import decode, encode, encode_plain

_NAMES = frozenset({"version", "job", "plan_digest", "cursor", "micro_step", "dp_size"})
MOST_DEPTH = 32


def sealed(state: ResumeState) -> ResumeState:
    return replace(state, seal=seal_of(state))


def seal_of(state: ResumeState) -> str:
    """Of all else in it: that its packs fit its lanes, or how far into its step it is, is known to
    nobody but who saved it."""
    return hashlib.sha256(encode(replace(state, seal=""))).hexdigest()[:32]


def states_in(value: Any) -> list[ResumeState]:
    """The different states in nested dicts and lists, in the order in which they stand.

    Raises WireError for one that is damaged.
    """
    found: list[ResumeState] = []
    _look(value, found, MOST_DEPTH)
    return found


def _look(value: Any, found: list[ResumeState], depth: int) -> None:
    if depth == 0:
        return
    if isinstance(value, dict):
        if value.keys() >= _NAMES:
            state = decode(ResumeState, encode_plain(value, what="state"))
            if state not in found:
                found.append(state)
            return
        value = list(value.values())
    if isinstance(value, list | tuple):
        for element in value:
            _look(element, found, depth - 1)


def the_state_in(value: Any, *, name: str) -> ResumeState:
    """The one that `value`, which stands in `name`, holds; WireError where there is none, several,
    or a damaged one."""
    try:
        found = states_in(value)
    except WireError as error:
        raise WireError(f"{name} holds a damaged state: {error}") from None
    if not found:
        raise WireError(
            f"{name} holds no state of a PackStream; save what stream.state_dict() gives after a "
            "batch"
        )
    if len(found) > 1:
        steps = ", ".join(str(state.cursor.step) for state in found)
        raise WireError(f"{name} holds {len(found)} different states (of steps {steps}); give one")
    return found[0]

"""What `dataservice state` says of a saved state, and of what lies between two of them.

Invariants: nothing but the files is looked at, so nothing is said of whether a service serves the
plan; --json and the text say the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dataservice.actors.policies import policy_of
from dataservice.actors.resuming import STATE_VERSION, check_values
from dataservice.cli.replay_run import sizes_text
from dataservice.errors import ResumeRefused
from dataservice.wire.messages import ResumeState
from dataservice.wire.states import seal_of

DIGITS = 12
"""Of a digest."""
LANES_SHOWN = 8


def damage_of(state: ResumeState) -> str | None:
    """Why no service goes on with it, as far as the state alone tells; None where it may."""
    if state.version != STATE_VERSION:
        return (
            f"it has version {state.version}, this dataservice reads {STATE_VERSION}: resume with "
            "the version that saved it"
        )
    try:
        check_values(state)
        policy_of(state.decoder)
    except ResumeRefused as error:
        return str(error)
    if state.seal != seal_of(state):
        return "its seal does not fit its values: it is damaged or was changed"
    return None


def state_object(state: ResumeState) -> dict[str, Any]:
    cursor, damage = state.cursor, damage_of(state)
    return {
        "outcome": "ok" if damage is None else "damaged",
        "reason": damage,
        "version": state.version,
        "job": state.job,
        "plan_digest": state.plan_digest,
        "phase": cursor.phase,
        "phase_digest": cursor.phase_digest,
        "step": cursor.step,
        "micro_step": state.micro_step,
        "dp_size": state.dp_size,
        "micro_steps": state.micro_steps,
        "packs_per_cell": state.packs_per_cell,
        "packs_before_step": sum(cursor.next_pack),
        "next_pack": list(cursor.next_pack),
        "lanes": [list(place) for place in cursor.lanes],
        "next_lane": list(cursor.next_lane),
        "lane_homes": list(cursor.lane_homes),
        "ranks_per_node": cursor.ranks_per_node,
        "excluded": cursor.excluded,
        "built_by": state.decoder,
        "seal": state.seal,
    }


def state_text(name: str, told: dict[str, Any]) -> Iterator[str]:
    """The lines for a person, of what `state_object` gave."""
    yield f"{name}: a state of job {told['job']}"
    if told["reason"] is not None:
        yield f"  no service goes on with it: {told['reason']}"
    yield f"  delivered: {_delivered(told)}"
    yield f"  goes on with: {_place(told)}"
    yield f"  saved with: {_sizes(told)}"
    yield f"  plan {told['plan_digest'][:DIGITS]}, in phase {told['phase']} of it"
    yield f"  lanes: {_lanes(told)}"
    homes = sorted({home for home in told["lane_homes"] if home >= 0})
    if homes:
        ranks = told["ranks_per_node"]
        held = f", each with {ranks} ranks" if ranks else ", without ranks"
        yield f"  data nodes: {len(homes)} stage the lanes{held}"
    yield f"  left out of the data so far: {told['excluded'] or 'nothing'}"
    yield f"  packs built by: {told['built_by']}"


def _delivered(told: dict[str, Any]) -> str:
    packs, step = told["packs_before_step"], told["step"]
    kinds = ""
    if len(told["next_pack"]) == 2:
        kinds = " ({:,} of text, {:,} with images)".format(*told["next_pack"])
    whole = "no step yet" if step == 0 else f"steps 0 to {step - 1:,}, {packs:,} packs{kinds}"
    if not told["micro_step"]:
        return whole
    return f"{whole}, and of step {step:,} the first {told['micro_step']} micro-steps"


def _place(told: dict[str, Any]) -> str:
    where = f"step {told['step']:,}"
    if told["micro_step"]:
        where += f", micro-step {told['micro_step']} of {told['micro_steps']}, in the same sizes"
    return where


def _sizes(told: dict[str, Any]) -> str:
    return sizes_text(told["dp_size"], told["micro_steps"], told["packs_per_cell"])


def _lanes(told: dict[str, Any]) -> str:
    places = told["lanes"]
    shown = ", ".join(
        f"{lane}: window {place[0]:,} pack {place[1]:,}"
        for lane, place in enumerate(places[:LANES_SHOWN])
        if len(place) == 2
    )
    more = f", and {len(places) - LANES_SHOWN:,} more" if len(places) > LANES_SHOWN else ""
    return f"{len(places):,} ({shown}{more}); next is {' and '.join(map(str, told['next_lane']))}"


# ---- two of them --------------------------------------------------------------------------------


def changes(first: dict[str, Any], second: dict[str, Any]) -> dict[str, list[Any]]:
    """Field to both values, of `state_object`s; those that every state has of its own left out."""
    return {
        name: [first[name], second[name]]
        for name in first
        if first[name] != second[name] and name not in ("outcome", "reason", "seal")
    }


def changes_text(first: dict[str, Any], second: dict[str, Any]) -> Iterator[str]:
    """What lies between two states, in words."""
    changed = changes(first, second)
    if not changed:
        yield "both say the same"
        return
    if "job" in changed:
        yield f"they are of different jobs, {first['job']} and {second['job']}"
        return
    yield from _plans(first, second, changed)
    yield from _progress(first, second)
    yield from _went_back(first, second)
    for name, words in (
        ("dp_size", "DP ranks"),
        ("micro_steps", "micro-steps of a step"),
        ("packs_per_cell", "packs of a micro-batch"),
        ("ranks_per_node", "ranks of a data node"),
        ("built_by", "packs were built by"),
    ):
        if name in changed:
            yield f"{words}: {first[name]}, then {second[name]}"
    if "lane_homes" in changed and len(first["lane_homes"]) == len(second["lane_homes"]):
        pairs = zip(first["lane_homes"], second["lane_homes"], strict=True)
        moved = sum(a != b for a, b in pairs)
        yield f"{moved:,} of {len(first['lane_homes']):,} lanes are staged by other data nodes"
    if "excluded" in changed:
        before, after = first["excluded"] or "nothing", second["excluded"] or "nothing"
        yield f"left out of the data: {before}, then {after}"


def _plans(
    first: dict[str, Any], second: dict[str, Any], changed: dict[str, list[Any]]
) -> Iterator[str]:
    if "plan_digest" not in changed:
        yield f"of one plan, {first['plan_digest'][:DIGITS]}"
        return
    same = "phase" not in changed and "phase_digest" not in changed
    both = f"{first['plan_digest'][:DIGITS]} and {second['plan_digest'][:DIGITS]}"
    if same:
        yield f"of different plans, {both}, which agree in phase {first['phase']}"
    else:
        yield f"of different plans, {both}: another config, seed or data"


def _progress(first: dict[str, Any], second: dict[str, Any]) -> Iterator[str]:
    places = [(of["step"], of["micro_step"]) for of in (first, second)]
    if places[0] == places[1]:
        yield f"both go on with {_place(first)}"
        return
    ahead, early, late = (
        ("second", first, second) if places[0] < places[1] else ("first", second, first)
    )
    steps = late["step"] - early["step"]
    packs = late["packs_before_step"] - early["packs_before_step"]
    words = f"the {ahead} is further: {_place(early)}, then {_place(late)}"
    if steps:
        words += f"; {steps:,} steps, {packs:,} packs between them"
    yield words
    sizes = ("dp_size", "micro_steps", "packs_per_cell")
    usual = early["dp_size"] * early["micro_steps"] * early["packs_per_cell"] * steps
    same = all(early[name] == late[name] for name in sizes)
    if same and len(early["next_pack"]) == 1 and packs != usual:
        yield (
            f"{steps:,} steps of these sizes have {usual:,} packs: others were used in between, "
            "steps were skipped, or a phase ended"
        )


def _went_back(first: dict[str, Any], second: dict[str, Any]) -> Iterator[str]:
    """Lanes that stand earlier in the state that is further: no run does that."""
    if first["phase_digest"] != second["phase_digest"]:
        return
    if len(first["lanes"]) != len(second["lanes"]):
        yield f"lanes: {len(first['lanes']):,}, then {len(second['lanes']):,}"
        return
    later, earlier = (first, second) if first["step"] > second["step"] else (second, first)
    pairs = zip(earlier["lanes"], later["lanes"], strict=True)
    back = [lane for lane, (before, after) in enumerate(pairs) if after < before]
    if back:
        named = ", ".join(map(str, back[:LANES_SHOWN]))
        yield (
            f"{len(back):,} lanes ({named}) stand earlier in the state that is further: the two "
            "are not of one run"
        )

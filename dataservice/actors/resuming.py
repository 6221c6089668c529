"""Whether a saved state can be continued here, exactly.

Invariants: a state goes on exactly or is refused with both values and the remedy; one that no
service can have saved, or that was changed since, is refused before anything is planned.
"""

from __future__ import annotations

from dataservice.actors.plan_messages import PlanInfo
from dataservice.actors.policies import check_policy, decoder_and_policy
from dataservice.core.exclusions import Exclusions
from dataservice.core.limits import MAX_STEP_PACKS
from dataservice.core.settings import Grid
from dataservice.errors import ResumeRefused
from dataservice.wire.messages import ResumeState
from dataservice.wire.states import seal_of

STATE_VERSION = 3
LARGEST_COUNT = 1 << 40
"""Steps, packs, windows and samples that no run reaches."""


def check_excluded(
    *, saved: str, exclude: Exclusions, last_step: int, what: str, elsewhere: str
) -> None:
    """Raises ResumeRefused when `what`, which was under the exclusions `saved` up to and with step
    `last_step`, would go on under others."""
    now = exclude.in_force(last_step)
    if saved != now:
        raise ResumeRefused(
            f"{what} has excluded {saved or 'nothing'} before step {last_step + 1}, this service "
            f"{now or 'nothing'}: serve with the `exclude` that it began with (more may be "
            f"excluded from step {last_step + 1} on), or {elsewhere}"
        )


def check_state(
    state: ResumeState,
    *,
    grid: Grid,
    job: str,
    plan: PlanInfo,
    built_by: str,
    exclude: Exclusions,
) -> None:
    """Raises ResumeRefused, with both values and the remedy, when `state` cannot go on exactly.

    A state of another plan goes on when the plans agree in its phase and it was saved between
    steps.
    """

    def refuse(what: str, saved: object, now: object, remedy: str) -> None:
        raise ResumeRefused(f"the saved state has {what} {saved}, this service {now}: {remedy}")

    if state.version != STATE_VERSION:
        refuse("version", state.version, STATE_VERSION, "resume with the version that saved it")
    if state.job != job:
        refuse("job", state.job, job, "connect to the service of that job")
    check_values(state)
    cursor = state.cursor
    same_phase = plan.phase_digests[cursor.phase : cursor.phase + 1] == (cursor.phase_digest,)
    if state.plan_digest != plan.digest and not same_phase:
        refuse(
            "plan digest",
            state.plan_digest,
            plan.digest,
            "serve with the config, seed and data that it was saved with; "
            f"{_new_phase(state, plan)}; or start a new run without a state",
        )
    if state.plan_digest != plan.digest and state.micro_step:
        refuse(
            "plan digest",
            state.plan_digest,
            plan.digest,
            f"it was saved inside step {cursor.step} (micro-step {state.micro_step}), where a "
            "plan cannot be changed; use a state that was saved between steps",
        )
    _check_shape(state, plan)
    check_excluded(
        saved=cursor.excluded,
        exclude=exclude,
        last_step=cursor.step - (state.micro_step == 0),
        what="the saved state",
        elsewhere="resume from a state of an earlier step",
    )
    saved_decoder, saved_policy = decoder_and_policy(state.decoder)
    decoder, policy = decoder_and_policy(built_by)
    check_policy(saved=saved_policy, now=policy, what="the saved state")
    if saved_decoder != decoder:
        refuse(
            "decoder",
            saved_decoder,
            decoder,
            "install the same image libraries, because other builds may decode other pixels, "
            "or start a new run without a state",
        )
    saved = (state.dp_size, state.micro_steps, state.packs_per_cell)
    now = (grid.dp_size, grid.micro_steps, grid.packs_per_cell)
    if state.micro_step and saved != now:
        refuse(
            "(dp_size, micro_steps, packs_per_cell)",
            saved,
            now,
            f"it was saved inside step {state.cursor.step} (micro-step {state.micro_step}); "
            "use the same sizes, or a state that was saved between steps",
        )
    if state.seal != (seal := seal_of(state)):
        raise _damaged("the seal", state.seal or "none", seal)


def _damaged(what: str, saved: object, expected: str) -> ResumeRefused:
    return ResumeRefused(
        f"the saved state has {what} {saved}, should be {expected}: it is damaged or was changed; "
        "resume from another checkpoint, or start a new run without a state"
    )


def check_values(state: ResumeState) -> None:
    """What no service can have saved, whatever its plan."""
    cursor = state.cursor
    sizes = {
        "dp_size": state.dp_size,
        "micro_steps": state.micro_steps,
        "packs_per_cell": state.packs_per_cell,
    }
    for name, size in sizes.items():
        if not 1 <= size <= MAX_STEP_PACKS:
            raise _damaged(name, size, f"from 1 to {MAX_STEP_PACKS}")
    if not 0 <= state.micro_step < state.micro_steps:
        raise _damaged("micro_step", state.micro_step, f"from 0 to {state.micro_steps - 1}")
    for lane, place in enumerate(cursor.lanes):
        if len(place) != 2:
            raise _damaged(f"lanes[{lane}]", list(place), "a window and an offset in it")
    counts = {
        "step": (cursor.step,),
        "phase": (cursor.phase,),
        "next_pack": cursor.next_pack,
        "lanes": tuple(number for place in cursor.lanes for number in place),
        "next_lane": cursor.next_lane,
    }
    for name, numbers in counts.items():
        for number in numbers:
            if not 0 <= number < LARGEST_COUNT:
                raise _damaged(name, number, f"from 0 to {LARGEST_COUNT - 1}")
    for home in cursor.lane_homes:
        if not -1 <= home < MAX_STEP_PACKS:
            raise _damaged("lane_homes", home, f"from -1 to {MAX_STEP_PACKS - 1}")
    per_node = cursor.ranks_per_node
    if per_node < 0 or (state.micro_step and per_node and state.dp_size % per_node):
        raise _damaged("ranks_per_node", per_node, f"0 or a divisor of dp_size {state.dp_size}")


def _check_shape(state: ResumeState, plan: PlanInfo) -> None:
    """Of a state of this plan, or of one that agrees with it in the state's phase."""
    cursor = state.cursor
    if plan.phase_digests[cursor.phase : cursor.phase + 1] != (cursor.phase_digest,):
        raise _damaged(
            "phase", f"{cursor.phase} of digest {cursor.phase_digest}", "one of the plan's"
        )
    streams = len(plan.stream_lanes)
    for name, found, expected in (
        ("next_pack", cursor.next_pack, streams),
        ("next_lane", cursor.next_lane, streams),
        ("lanes", cursor.lanes, plan.num_lanes),
        ("lane_homes", cursor.lane_homes, plan.num_lanes),
    ):
        if len(found) != expected:
            raise _damaged(f"{len(found)} values in", name, f"{expected}")
    for lane, num_lanes in zip(cursor.next_lane, plan.stream_lanes, strict=True):
        if lane >= num_lanes:
            raise _damaged("next_lane", lane, f"from 0 to {num_lanes - 1}")


def _new_phase(state: ResumeState, plan: PlanInfo) -> str:
    """How to go on from a state with other settings, in words."""
    cursor = state.cursor
    if sum(plan.stream_lanes) != len(cursor.lanes) or len(plan.stream_lanes) != len(
        cursor.next_pack
    ):
        return (
            f"for other settings from here on, begin with lanes as they were ({len(cursor.lanes)} "
            f"in all, this plan has {sum(plan.stream_lanes)})"
        )
    ends, lane = [], 0
    for count, firsts in zip(plan.stream_lanes, plan.phase_windows, strict=True):
        places = cursor.lanes[lane : lane + count]
        begun = max(window + (offset > 0) for window, offset in places)
        ends.append(begun - max(first for first in firsts if first <= begun))
        lane += count
    names = ("windows", "vision_windows")
    given = ", ".join(f"{name}: {end}" for name, end in zip(names, ends, strict=False))
    return (
        f"for other settings from here on, leave phase {cursor.phase} of the plan and its lanes "
        f"and window as they were, end it in plan.phases with `{given}` (with `packs: "
        f"{sum(cursor.next_pack)}` besides it is cut here at once) and put a phase with the new "
        "settings behind it"
    )

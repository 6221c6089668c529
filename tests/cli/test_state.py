"""`dataservice state`: one saved state in words, and what lies between two."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from support.command import run
from support.demo_config import demo_config

from dataservice.actors.planner import cursor_state
from dataservice.actors.resuming import STATE_VERSION
from dataservice.core.plan import Plan
from dataservice.core.settings import Grid
from dataservice.storage.index import Index
from dataservice.wire.messages import ResumeState
from dataservice.wire.schema import decode_plain, encode
from dataservice.wire.states import sealed

GRID = Grid(dp_size=2, micro_steps=2, packs_per_cell=1)
PACKS = 4
"""Of a step."""


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    config = demo_config(tmp_path_factory.mktemp("state"))
    return Plan(config.plan, Index.open(config.index_dir))


def state_at(plan: Plan, step: int, **changes: Any) -> ResumeState:
    cursor = plan.skip(plan.start(), GRID, step)
    assert cursor.step == step
    homes = tuple(lane % 2 for lane in range(plan.num_lanes))
    state = ResumeState(
        version=STATE_VERSION,
        job="test",
        plan_digest=plan.digest,
        decoder="pil 1; errors.bad_image hole",
        cursor=cursor_state(plan, cursor, homes, 2),
        micro_step=0,
        dp_size=GRID.dp_size,
        micro_steps=GRID.micro_steps,
        packs_per_cell=GRID.packs_per_cell,
    )
    return sealed(dataclasses.replace(state, **changes))


def saved(folder: Path, name: str, state: ResumeState) -> Path:
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"stream": [decode_plain(encode(state), what="state")]}))
    return path


def between(capsys: pytest.CaptureFixture[str], first: Path, second: Path, *, code: int = 0) -> str:
    """The words of a comparison, which --json has, too."""
    assert run("state", first, second, "--json") == code
    words: list[str] = json.loads(capsys.readouterr().out)["words"]
    assert run("state", first, second) == code
    assert capsys.readouterr().out.endswith("\n".join(words) + "\n")
    return "\n".join(words)


def test_a_state_is_explained(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(tmp_path, "a", state_at(plan, 5, micro_step=1))
    assert run("state", path) == 0
    out = capsys.readouterr().out
    assert f"{path}: a state of job test\n" in out
    assert "delivered: steps 0 to 4, 20 packs, and of step 5 the first 1 micro-steps" in out
    assert "goes on with: step 5, micro-step 1 of 2, in the same sizes" in out
    assert "DP 2 x 2 micro-steps x packs_per_cell 1" in out
    assert f"plan {plan.digest[:12]}" in out and "data nodes: 2 stage the lanes" in out
    assert "left out of the data so far: nothing" in out
    assert run("state", path, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["outcome"], told["packs_before_step"]) == ("ok", 5 * PACKS)
    lane = told["lanes"][0]
    assert f"lanes: {plan.num_lanes} (0: window {lane[0]} pack {lane[1]}" in out
    assert run("state", saved(tmp_path, "start", state_at(plan, 0))) == 0
    assert "delivered: no step yet" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dp_size": 4}, "its seal does not fit its values"),
        ({"micro_step": 7}, "micro_step 7, should be from 0 to 1"),
        ({"version": 1}, f"it has version 1, this dataservice reads {STATE_VERSION}"),
        ({"decoder": "pil; errors.bad_image what"}, "errors.bad_image what, should be one of hole"),
    ],
)
def test_damage_is_said_and_is_exit_code_1(
    plan: Plan,
    tmp_path: Path,
    change: dict[str, Any],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    good = state_at(plan, 3)
    path = saved(tmp_path, "bad", dataclasses.replace(good, **change))
    assert run("state", path) == 1
    out = capsys.readouterr().out
    assert "no service goes on with it: " in out and message in out
    between(capsys, saved(tmp_path, "good", good), path, code=1)


def test_two_states_of_a_run(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    early, late = (saved(tmp_path, str(n), state_at(plan, n)) for n in (2, 7))
    assert between(capsys, early, early) == "both say the same"
    words = between(capsys, early, late)
    assert f"of one plan, {plan.digest[:12]}" in words
    assert "the second is further: step 2, then step 7; 5 steps, 20 packs between them" in words
    assert "used in between" not in words and "not of one run" not in words
    assert "the first is further: step 2, then step 7" in between(capsys, late, early)
    within = saved(tmp_path, "within", state_at(plan, 2, micro_step=1))
    assert "step 2, then step 2, micro-step 1 of 2" in between(capsys, early, within)
    wide = saved(tmp_path, "wide", state_at(plan, 7, dp_size=4, micro_steps=1))
    words = between(capsys, early, wide)
    assert "DP ranks: 2, then 4" in words and "micro-steps of a step: 2, then 1" in words


def test_two_states_that_no_run_has(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = state_at(plan, 2), state_at(plan, 7)
    early, late = saved(tmp_path, "early", first), saved(tmp_path, "late", second)
    other = saved(tmp_path, "other", sealed(dataclasses.replace(second, job="other")))
    assert between(capsys, early, other) == "they are of different jobs, test and other"
    back = dataclasses.replace(second.cursor, lanes=plan.start().lanes)
    assert "stand earlier in the state that is further" in between(
        capsys, early, saved(tmp_path, "back", sealed(dataclasses.replace(second, cursor=back)))
    )
    cursor = dataclasses.replace(second.cursor, next_pack=(90,), lane_homes=(1,) * plan.num_lanes)
    jumped = sealed(dataclasses.replace(second, cursor=cursor))
    words = between(capsys, early, saved(tmp_path, "jumped", jumped))
    assert "5 steps of these sizes have 20 packs: others were used in between" in words
    assert "2 of 4 lanes are staged by other data nodes" in words
    changed = dataclasses.replace(
        second, plan_digest="0" * 64, decoder="pil 2; errors.bad_image hole"
    )
    words = between(capsys, late, saved(tmp_path, "plan", sealed(changed)))
    assert "which agree in phase 0" in words and "packs were built by: pil 1" in words
    cursor = dataclasses.replace(second.cursor, phase_digest="1" * 64)
    changed = dataclasses.replace(second, plan_digest="0" * 64, cursor=cursor)
    words = between(capsys, late, saved(tmp_path, "seed", sealed(changed)))
    assert "another config, seed or data" in words


def test_what_is_no_state_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "b.json").write_text("x")
    assert run("state", tmp_path / "a.json") == 2
    assert f"error: {tmp_path / 'a.json'} holds no state" in capsys.readouterr().err
    assert run("state", tmp_path / "b.json") == 2
    assert "is no JSON: save stream.state_dict() with json.dump" in capsys.readouterr().err
    assert run("state", tmp_path / "none.json") == 2
    assert "cannot be read" in capsys.readouterr().err

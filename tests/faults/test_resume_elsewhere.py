"""A saved state goes on exactly under other sizes; under another plan it is refused, with why."""

from __future__ import annotations

import dataclasses
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.demo_config import DATA, demo_settings, write_config
from support.harness import Readers, read_ranks
from support.local_service import LocalService
from support.proof import nothing_leaks

from dataservice.config import Config, load_config
from dataservice.errors import ResumeRefused
from dataservice.indexing import update_index
from dataservice.pipeline.images import decoder_fingerprint

JOB = "test"
SAVED_AT = 2
STEPS = 6


def indexed(folder: Path, records: Path, **sections: Any) -> Config:
    given = demo_settings(
        folder,
        plan={"pack_length": 2048, "lanes": 2, "window": 60},
        staging={"cache_dir": None},
        **sections,
    )
    given["sources"] = [given["sources"][2], {"name": "text", "records": str(records / "*.jsonl")}]
    config = load_config(str(write_config(folder, given)))
    Path(config.index_dir).mkdir(parents=True, exist_ok=True)
    update_index(config)
    return config


@dataclasses.dataclass
class Base:
    config: Config
    whole: Readers
    """STEPS steps of two ranks and two micro-steps."""
    states: dict[int, dict[str, Any]]
    """After SAVED_AT of them."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    folder = tmp_path_factory.mktemp("job")
    (folder / "text").mkdir()
    shutil.copy(DATA / "text" / "text-00000.jsonl", folder / "text")
    config = indexed(folder, folder / "text")
    sizes = {"job": JOB, "dp_size": 2, "micro_steps": 2}
    with LocalService(config) as service:
        first = read_ranks(service.endpoint, **sizes, steps=SAVED_AT)
        rest = read_ranks(service.endpoint, **sizes, steps=STEPS - SAVED_AT, states=first.states)
    rest.deliveries[:0] = first.deliveries
    return Base(config=config, whole=rest, states=first.states)


def packs_of(readers: Readers) -> dict[int, tuple[str, str]]:
    """Global number -> pack id and digest; each number once."""
    found: dict[int, tuple[str, str]] = {}
    for d in readers.deliveries:
        for number, pack_id, digest in zip(d.numbers, d.pack_ids, d.digests, strict=True):
            assert number not in found
            found[number] = (pack_id, digest)
    return found


@pytest.mark.parametrize(
    ("dp_size", "micro_steps", "steps"), [(4, 1, 4), (1, 4, 4), (1, 2, 8), (3, 1, 5), (2, 3, 2)]
)
def test_other_sizes_go_on_with_the_same_packs_in_the_same_order(
    base: Base, tmp_path: Path, dp_size: int, micro_steps: int, steps: int
) -> None:
    config = dataclasses.replace(base.config, state_dir=str(tmp_path / "state"))
    states = dict.fromkeys(range(dp_size), base.states[0])
    with nothing_leaks(), LocalService(config) as service:
        begun = time.monotonic()
        readers = read_ranks(
            service.endpoint,
            job=JOB,
            dp_size=dp_size,
            micro_steps=micro_steps,
            steps=steps,
            states=states,
        )
        assert service.status()["counters"]["sessions"] == 1
    whole, resumed = packs_of(base.whole), packs_of(readers)
    first, count = SAVED_AT * 4, steps * dp_size * micro_steps
    assert sorted(resumed) == list(range(first, first + count))
    both = whole.keys() & resumed.keys()
    assert len(both) == min(count, STEPS * 4 - first)
    assert {n: whole[n] for n in both} == {n: resumed[n] for n in both}
    recovered_s = min(d.at for d in readers.deliveries) - begun
    print(f"recovered in {recovered_s:.1f} s: {dp_size} x {micro_steps} ranks and micro-steps")


def another_seed(config: Config, _: Path) -> Config:
    return dataclasses.replace(config, plan=dataclasses.replace(config.plan, seed=1))


def another_packing(config: Config, _: Path) -> Config:
    return dataclasses.replace(config, plan=dataclasses.replace(config.plan, packer="lbf"))


def other_lanes(config: Config, _: Path) -> Config:
    return dataclasses.replace(config, plan=dataclasses.replace(config.plan, lanes=3))


def another_manifest(config: Config, folder: Path) -> Config:
    (folder / "text").mkdir(parents=True)
    for name in ("text-00000.jsonl", "text-00001.jsonl"):
        shutil.copy(DATA / "text" / name, folder / "text")
    return indexed(folder / "other", folder / "text")


def another_policy(config: Config, _: Path) -> Config:
    errors = dataclasses.replace(config.errors, bad_image="fallback")
    return dataclasses.replace(config, errors=errors)


def another_job(config: Config, _: Path) -> Config:
    return config


PLAN = (
    "the saved state has plan digest H, this service H: serve with the config, seed and data that "
    "it was saved with; for other settings from here on, {how}; or start a new run without a state"
)
NEW_PHASE = (
    "leave phase 0 of the plan and its lanes and window as they were, end it in plan.phases with "
    "`windows: 1` (with `packs: 8` besides it is cut here at once) and put a phase with the new "
    "settings behind it"
)
DAMAGED = (
    "it is damaged or was changed; resume from another checkpoint, or start a new run without a "
    "state"
)
REFUSALS: dict[str, tuple[Callable[[Config, Path], Config], dict[str, Any], str]] = {
    "seed": (another_seed, {}, PLAN.format(how=NEW_PHASE)),
    "packing": (another_packing, {}, PLAN.format(how=NEW_PHASE)),
    "manifest": (another_manifest, {}, PLAN.format(how=NEW_PHASE)),
    "lanes": (
        other_lanes,
        {},
        PLAN.format(how="begin with lanes as they were (2 in all, this plan has 3)"),
    ),
    "policy": (
        another_policy,
        {},
        "the saved state has errors.bad_image hole, this service fallback: serve with "
        "errors.bad_image: hole, because packs under the other have other bytes, or start a new "
        "run without a state",
    ),
    "job": (
        another_job,
        {"job": "elsewhere"},
        "the saved state has job elsewhere, this service test: connect to the service of that job",
    ),
    "decoder": (
        another_job,
        {"decoder": "pillow 1; errors.bad_image hole"},
        "the saved state has decoder pillow 1, this service D: install the same image libraries, "
        "because other builds may decode other pixels, or start a new run without a state",
    ),
    "sizes inside a step": (
        another_job,
        {"micro_step": 1, "dp_size": 4},
        "the saved state has (dp_size, micro_steps, packs_per_cell) (4, 2, 1), this service "
        "(2, 2, 1): it was saved inside step 2 (micro-step 1); use the same sizes, or a state that "
        "was saved between steps",
    ),
    "packs that do not fit the lanes": (
        another_job,
        {"cursor": {"next_pack": [9]}},
        f"the saved state has the seal H, should be H: {DAMAGED}",
    ),
    "lanes that do not fit the packs": (
        another_job,
        {"cursor": {"lanes": [[0, 5], [0, 4]]}},
        f"the saved state has the seal H, should be H: {DAMAGED}",
    ),
    "micro-steps that are not over": (
        another_job,
        {"micro_step": 1},
        f"the saved state has the seal H, should be H: {DAMAGED}",
    ),
    "version": (
        another_job,
        {"version": 2},
        "the state has version 2, this client reads version 3; use the version of the client that "
        "wrote it",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_go_on_exactly_is_refused_in_these_words(
    base: Base, tmp_path: Path, name: str
) -> None:
    change, fields, words = REFUSALS[name]
    config = dataclasses.replace(change(base.config, tmp_path), state_dir=str(tmp_path / "state"))
    state = base.states[0] | {k: v for k, v in fields.items() if k != "cursor"}
    state["cursor"] = state["cursor"] | fields.get("cursor", {})
    with LocalService(config) as service:
        with pytest.raises(ResumeRefused) as refused:
            read_ranks(
                service.endpoint,
                job=JOB,
                dp_size=2,
                micro_steps=2,
                steps=1,
                states={0: state, 1: state},
                timeout_s=30.0,
            )
        assert service.status()["session"] is None
    said = re.sub(r"\b[0-9a-f]{64}\b|\b[0-9a-f]{32}\b", "H", str(refused.value))
    assert said.replace(decoder_fingerprint(), "D") == words

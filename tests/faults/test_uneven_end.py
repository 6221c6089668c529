"""The data ends unevenly: whatever its size, all ranks end at the same step."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.demo_config import demo_settings, write_config
from support.harness import read_ranks
from support.local_service import LocalService
from support.proof import clean_run, nothing_leaks, prove_same

from dataservice.config import Config, load_config
from dataservice.core.settings import Grid, SourceShare
from dataservice.indexing import update_index
from tests.core.planning import make_plan, steps_of
from tests.core.synthetic import SyntheticIndex, SyntheticSource

JOB = "test"


@settings(max_examples=60, deadline=None)
@given(
    samples=st.integers(1, 260),
    other=st.integers(0, 40),
    ranks=st.integers(1, 7),
    micro_steps=st.integers(1, 3),
    packs_per_cell=st.integers(1, 2),
    remainder=st.sampled_from(["pad", "drop"]),
    lanes=st.integers(1, 4),
)
def test_every_rank_has_all_cells_of_every_step_and_the_rest_is_as_the_plan_says(
    samples: int,
    other: int,
    ranks: int,
    micro_steps: int,
    packs_per_cell: int,
    remainder: str,
    lanes: int,
) -> None:
    sources = [SyntheticSource(name="text", num_samples=samples)]
    if other:
        sources.append(SyntheticSource(name="mixed", num_samples=other, kind="mixed", salt=1))
    plan = make_plan(
        SyntheticIndex(sources),
        sources=tuple(SourceShare(name=source.name) for source in sources),
        lanes=lanes,
        window=20,
        remainder=remainder,
    )
    windows = [(lane, w) for lane in range(lanes) for w in range(plan.windows_in(lane) or 0)]
    all_packs = {f"{a}.{b}.{i}" for a, b in windows for i in range(plan.window(a, b).num_packs)}
    grid = Grid(dp_size=ranks, micro_steps=micro_steps, packs_per_cell=packs_per_cell)
    steps = list(steps_of(plan, grid))
    seen: Counter[str] = Counter()
    for step in steps:
        cells = Counter(zip(step.micro_step.tolist(), step.dp_rank.tolist(), strict=True))
        assert len(cells) == ranks * micro_steps
        assert set(cells.values()) == {packs_per_cell}
        seen.update(step.pack_id(i) for i in range(step.num_packs) if step.lane[i] >= 0)
    assert not seen or max(seen.values()) == 1
    padding = sum(int((step.lane < 0).sum()) for step in steps)
    left = len(all_packs) - len(seen)
    assert set(seen) <= all_packs
    if remainder == "pad":
        assert left == 0
        assert padding == len(steps) * grid.num_packs - len(all_packs) < grid.num_packs
    else:
        assert padding == 0
        assert left == len(all_packs) % grid.num_packs


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("job")
    given = demo_settings(
        folder,
        plan={"pack_length": 4096, "lanes": 2, "window": 100},
        staging={"cache_dir": None},
    )
    given["sources"] = given["sources"][1:]
    config = load_config(str(write_config(folder, given)))
    Path(config.index_dir).mkdir()
    update_index(config)
    return config


@pytest.mark.parametrize("remainder", ["pad", "drop"])
def test_ranks_of_a_real_service_end_together(base: Config, tmp_path: Path, remainder: str) -> None:
    plan = dataclasses.replace(base.plan, remainder=remainder)
    config = dataclasses.replace(base, plan=plan, state_dir=str(tmp_path / "state"))
    clean = clean_run(config, dp_size=1, micro_steps=15, steps=None)
    with nothing_leaks(), LocalService(config) as service:
        readers = read_ranks(service.endpoint, job=JOB, dp_size=3, micro_steps=5, steps=None)
        session = service.status()["session"]
    last = {
        rank: max((d.step, d.micro_step) for d in readers.deliveries if d.dp_rank == rank)
        for rank in range(3)
    }
    assert set(last.values()) == {(session["end_step"] - 1, 4)}
    assert session["done"] == [[session["end_step"], 0]] * 3
    counts = Counter(d.dp_rank for d in readers.deliveries)
    assert len(set(counts.values())) == 1
    prove_same(clean, readers.deliveries)
    padded = [p for d in readers.deliveries for p in d.pack_ids if p.startswith("pad.")]
    assert bool(padded) == (remainder == "pad")

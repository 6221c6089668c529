import os
import signal
from pathlib import Path

import psutil
import pytest
from support.demo_config import demo_config

from dataservice.actors import spec_makers
from dataservice.actors.pack_specs import packed_spec, sample_mark, spec_of
from dataservice.actors.spec_makers import SpecMakers
from dataservice.actors.step_specs import StepSpecs, specs_of_step
from dataservice.core.plan import Plan
from dataservice.core.settings import Grid
from dataservice.core.tables import StepPlan
from dataservice.errors import WireError
from dataservice.storage.index import Index


class Bench:
    def __init__(self, folder: Path) -> None:
        config = demo_config(folder)
        self.index = Index.open(config.index_dir)
        self.rules = config.plan.vision
        self.plan = Plan(config.plan, self.index)
        step = self.plan.step(self.plan.start(), Grid(dp_size=4, micro_steps=4))
        assert step is not None
        self.step: StepPlan = step

    def specs(self, makers: SpecMakers) -> StepSpecs:
        return specs_of_step(self.plan, makers, self.step, ())


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def helpers() -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process().children(recursive=True)
        if "spawn_main" in " ".join(child.cmdline())
    ]


def test_specs_made_together_are_those_made_one_by_one(bench: Bench) -> None:
    made = bench.specs(SpecMakers(bench.index, bench.rules, helpers=0))
    step = bench.step
    assert len(made.packed) == step.num_packs
    for i in range(step.num_packs):
        window = bench.plan.window(int(step.lane[i]), int(step.window[i]))
        alone = bench.index.pack_spec(window, int(step.number[i]), rules=bench.rules)
        assert spec_of(made.packed[i]) == alone
        assert made.packed[i] == packed_spec(alone)
        assert made.marks[i] == [sample_mark(item.key) for item in alone.items]


def test_a_spec_that_was_changed_is_refused(bench: Bench) -> None:
    packed = bench.specs(SpecMakers(bench.index, bench.rules, helpers=0)).packed[0]
    for wrong in (packed[:-3], b"\0" + packed[1:], b""):
        with pytest.raises(WireError):
            spec_of(wrong)


def test_helpers_make_the_same_and_none_is_left(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = bench.specs(SpecMakers(bench.index, bench.rules, helpers=0))
    monkeypatch.setattr(spec_makers, "LARGE_STEP", 1)
    makers = SpecMakers(bench.index, bench.rules, helpers=1)
    try:
        assert bench.specs(makers) == alone
        (helper,) = helpers()
        os.kill(helper.pid, signal.SIGKILL)
        helper.wait(10)
        assert bench.specs(makers) == alone  # by this process
        assert bench.specs(makers) == alone  # by another helper
        assert len(helpers()) == 1
    finally:
        makers.close()
    assert helpers() == []

"""The specs of a step's packs, made window by window.

Invariants: in the order of the step's packs; all padding packs share one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from dataservice.actors.pack_specs import packed_spec
from dataservice.actors.spec_makers import Job, SpecMakers
from dataservice.core.packspec import PackSpec, padding_id
from dataservice.core.plan import Plan
from dataservice.core.tables import StepPlan


@dataclass(kw_only=True, slots=True)
class StepSpecs:
    packed: list[bytes]
    """`pack_specs.packed_spec` of each pack."""
    marks: list[list[int]]
    """`pack_specs.sample_marks` of each."""
    excluded: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Pack id -> hole keys of its samples that are left out on purpose."""
    num_excluded: int = 0

    @property
    def num_samples(self) -> int:
        return sum(map(len, self.marks))

    def mark_arrays(self) -> tuple[bytes, bytes]:
        """As `PlannedStep.sample_marks` and `sample_counts`."""
        flat = np.array([mark for one in self.marks for mark in one], dtype="<u4")
        counts = np.array([len(one) for one in self.marks], dtype="<i8")
        return flat.tobytes(), counts.tobytes()


def specs_of_step(
    plan: Plan, makers: SpecMakers, step: StepPlan, excluded: Collection[str]
) -> StepSpecs:
    """`excluded`: keys of samples."""
    padding = packed_spec(padding_spec(step.pack_length))
    found = StepSpecs(packed=[padding] * len(step.lane), marks=[[]] * len(step.lane))
    order = np.lexsort((step.window, step.lane))
    order = order[step.lane[order] >= 0]
    lanes, windows = step.lane[order], step.window[order]
    changes = (np.diff(lanes) != 0) | (np.diff(windows) != 0)
    groups = [
        these.tolist() for these in np.split(order, np.flatnonzero(changes) + 1) if len(these)
    ]
    jobs: list[Job] = [
        (
            plan.window(int(step.lane[these[0]]), int(step.window[these[0]])),
            step.number[these].tolist(),
        )
        for these in groups
    ]
    for these, made in zip(groups, makers.made(jobs, excluded), strict=True):
        for i, packed, marks in zip(these, made.packed, made.marks, strict=True):
            found.packed[i], found.marks[i] = packed, marks
        found.excluded |= made.excluded
        found.num_excluded += made.num_excluded
    return found


def padding_spec(pack_length: int) -> PackSpec:
    return PackSpec(
        pack_id=padding_id(pack_length),
        pack_length=pack_length,
        shards=(),
        items=(),
        num_tokens=0,
        num_patches=0,
    )

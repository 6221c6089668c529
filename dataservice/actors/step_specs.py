"""The specs of a step's packs, made window by window.

Invariants: in the order of the step's packs; all padding packs share one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from dataservice.actors.excluding import excluded_holes
from dataservice.actors.pack_specs import marks_array, packed_spec, sample_marks
from dataservice.core.packspec import PackSpec, padding_id
from dataservice.core.plan import Plan
from dataservice.core.tables import StepPlan
from dataservice.core.vision import VisionRules
from dataservice.storage.index import Index


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
        return marks_array(self.marks)


def specs_of_step(
    plan: Plan, index: Index, step: StepPlan, excluded: Collection[str], rules: VisionRules
) -> StepSpecs:
    """`excluded`: keys of samples."""
    padding = packed_spec(padding_spec(step.pack_length))
    made = StepSpecs(packed=[padding] * len(step.lane), marks=[[]] * len(step.lane))
    order = np.lexsort((step.window, step.lane))
    lanes, windows = step.lane[order], step.window[order]
    changes = (np.diff(lanes) != 0) | (np.diff(windows) != 0)
    for these in np.split(order, np.flatnonzero(changes) + 1):
        lane = int(step.lane[these[0]])
        if lane < 0:
            continue
        window = plan.window(lane, int(step.window[these[0]]))
        specs = index.pack_specs(window, step.number[these].tolist(), rules=rules)
        for i, spec in zip(these.tolist(), specs, strict=True):
            made.packed[i] = packed_spec(spec)
            made.marks[i] = sample_marks(spec)
        holes, count = excluded_holes(specs, excluded)
        made.excluded |= holes
        made.num_excluded += count
    return made


def padding_spec(pack_length: int) -> PackSpec:
    return PackSpec(
        pack_id=padding_id(pack_length),
        pack_length=pack_length,
        shards=(),
        items=(),
        num_tokens=0,
        num_patches=0,
    )

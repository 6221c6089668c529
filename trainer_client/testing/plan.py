"""A real plan over samples in memory, with packs built from them: what a FakeService serves.

Invariants: order, packs, placement, phases, remainder and cursors are those of `dataservice.core`;
packs follow from the samples, the plan's settings and the seed alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from dataservice.core.cursor import Cursor
from dataservice.core.packspec import PADDING, TOKEN_BYTES
from dataservice.core.plan import Plan
from dataservice.core.settings import Grid, PlanSettings, SourceShare
from dataservice.core.tables import WindowPlan
from dataservice.core.vision import VisionRules, tokens_of
from dataservice.wire.messages import CursorState, SessionOpened, StepSettings
from trainer_client.batch import IGNORE
from trainer_client.testing.samples import FakeSample, SampleTable, pixels_of
from trainer_client.testing.steps import FakeStep
from trainer_client.testing.synthetic import FAKE_INFO, FakePack, laid_out, padding_pack

FAKE_PLAN = PlanSettings(
    sources=(),
    pack_length=256,
    vision=VisionRules(patch=2, merge=2, min_pixels=64, max_pixels=1024),
)
"""Packs of 256 tokens, patches of 2 x 2 pixels, an image token of every 4 x 4; the sources are
filled in."""


class PlannedPacks:
    """A `steps.PackSource`."""

    def __init__(
        self, samples: Mapping[str, Sequence[FakeSample]], settings: PlanSettings, *, seed: int
    ) -> None:
        """Without sources in the settings all that have samples take part, with equal weights
        where the run is endless. Raises ConfigError."""
        if not settings.sources:
            weight = "1" if settings.epochs is None else None
            shares = tuple(SourceShare(name=name, weight=weight) for name in samples)
            settings = replace(settings, sources=shares)
        self._table = SampleTable(samples)
        self._seed = seed
        self.plan = Plan(settings, self._table)
        self.info = self._info()

    def start(self) -> CursorState:
        return self._state(self.plan.start())

    def step(self, cursor: CursorState, grid: Grid) -> FakeStep | None:
        found = self.plan.step(_cursor_of(cursor), grid)
        if found is None:
            return None
        then = self.plan.phase_of_step(found.next_cursor, grid)
        return FakeStep(
            cursor=cursor,
            next_cursor=self._state(found.next_cursor),
            settings=self._step_settings(found.phase, grid),
            next_step=None if then is None else self._step_settings(then, grid),
            pack_ids=tuple(map(found.pack_id, range(found.num_packs))),
            numbers=found.pack_number,
            micro_step=found.micro_step,
            dp_rank=found.dp_rank,
            num_images=found.num_images,
            size_bytes=TOKEN_BYTES * found.pack_length
            + self.plan.settings.vision.patch_bytes * found.num_patches,
            loss_tokens=found.total_loss_tokens,
        )

    def pack(self, pack_id: str) -> FakePack:
        if pack_id.startswith(PADDING):
            length = int(pack_id.removeprefix(PADDING))
            return padding_pack(replace(self.info, pack_length=length))
        lane, number, place = map(int, pack_id.split("."))
        return self._built(self.plan.window(lane, number), place)

    def _built(self, window: WindowPlan, number: int) -> FakePack:
        settings = self.plan.settings
        documents: list[tuple[list[int], list[int]]] = []
        keys, image_docs, grids = [], [], []
        pixels = [np.zeros(settings.vision.pixel_shape(0), np.uint8)]
        for item in range(*window.item_offsets[number : number + 2].tolist()):
            source, row = int(window.source[item]), int(window.row[item])
            start, stop = int(window.start[item]), int(window.stop[item])
            sample = self._table.samples[source][row]
            limit, sizes = int(window.image_limit[item]), []
            for image in range(len(sample.images)):
                rows, grid = pixels_of(
                    sample, image, settings.vision, limit, (self._seed, source, row)
                )
                sizes.append(tokens_of(len(rows) * settings.vision.row_patches, settings.vision))
                if image < window.kept_images[item]:
                    pixels.append(rows)
                    grids.append(grid)
                    image_docs.append(len(documents))
            ids, labels = sample.tokens(sizes)
            documents.append((ids[start:stop], [IGNORE, *labels[start + 1 : stop]]))
            whole = (start, stop) == (0, len(ids))
            name = f"{self._table.sources[source].name}/memory@{row}"
            keys.append(name if whole else f"{name}[{start}:{stop}]")
        arrays = laid_out(documents, replace(self.info, pack_length=window.pack_length))
        arrays["pixel_values"] = np.concatenate(pixels)
        arrays["image_grid_thw"] = np.array(grids, np.int32).reshape(-1, 3)
        arrays["image_doc_ids"] = np.array(image_docs, np.int32)
        return FakePack(
            arrays=arrays,
            meta={"num_docs": len(documents), "sample_keys": keys},
            loss_tokens=int(window.loss_tokens[number]),
            cost=int(window.cost[number]),
        )

    def _info(self) -> SessionOpened:
        settings = self.plan.settings
        vision, tiles = settings.vision, settings.vision.mode == "tiles"
        return replace(
            FAKE_INFO,
            plan_digest=self.plan.digest,
            pack_length=max(phase.pack_length for phase in self.plan.streams[0].phases),
            align=settings.align,
            patch=vision.patch,
            merge=vision.merge,
            temporal_patch=vision.temporal_patch,
            tile=vision.tile if tiles else 0,
            thumbnail=tiles and vision.thumbnail,
            tile_tokens=vision.tile_tokens if tiles else 0,
            mean=vision.mean,
            std=vision.std,
        )

    def _step_settings(self, phase: int, grid: Grid) -> StepSettings:
        mix = self.plan.streams[0].phases[phase]
        tiles = mix.rules.mode == "tiles"
        return StepSettings(
            pack_length=mix.pack_length,
            num_packs=self.plan.packs_per_cell(grid),
            max_pixels=0 if tiles else mix.rules.max_pixels,
            max_tiles=mix.rules.max_tiles if tiles else 0,
        )

    def _state(self, cursor: Cursor) -> CursorState:
        return CursorState(
            step=cursor.step,
            phase=cursor.phase,
            phase_digest=self.plan.phase_digests[cursor.phase],
            next_pack=cursor.next_pack,
            lanes=cursor.lanes,
            next_lane=cursor.next_lane,
            lane_homes=(-1,) * self.plan.num_lanes,
        )


def _cursor_of(state: CursorState) -> Cursor:
    return Cursor(
        step=state.step,
        phase=state.phase,
        next_pack=state.next_pack,
        lanes=tuple((window, offset) for window, offset in state.lanes),
        next_lane=state.next_lane,
    )

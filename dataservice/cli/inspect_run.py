"""What `dataservice inspect` does: finds a record or a file, looks at it, finds it in the plan.

Invariants: the index is read and brought up to date only where steps of the plan are asked for.
"""

from __future__ import annotations

from contextlib import closing
from typing import Any

from dataservice.cli.index_view import open_index
from dataservice.cli.inspect_view import archive_object, file_object, record_object
from dataservice.cli.plan_view import PlanView
from dataservice.cli.progress import progress
from dataservice.config import Config
from dataservice.core.settings import Grid
from dataservice.errors import ConfigError
from dataservice.linting.archive_summary import archive_summary
from dataservice.linting.file_summary import summary_of
from dataservice.linting.inspecting import Inspector, place_of


def inspected(
    config: Config, what: str, steps: tuple[int, int] | None, grid: Grid
) -> dict[str, Any]:
    """As --json has it. ConfigError for what is not there."""
    place = place_of(what)
    with closing(Inspector(config)) as inspector:
        whole = place.line is None and place.offset is None
        if whole and steps is not None:
            raise ConfigError(f"--steps: a sample has packs, {what} is a file; name a record")
        if whole and (archive := inspector.find_archive(place.file)) is not None:
            return archive_object(archive_summary(inspector, archive))
        where = inspector.find(place.file)
        if whole:
            size = where.file.stat.size_bytes
            with progress("inspect", "bytes") as show:
                found = summary_of(
                    inspector, where, config.plan, lambda done: show(min(done, size), size, "")
                )
            return file_object(found, config)
        record = inspector.record(where, place)
    places = None if steps is None else _places(config, record.key, steps, grid)
    told: dict[str, Any] = record_object(record, config, places)
    return told


def _places(config: Config, key: str, steps: tuple[int, int], grid: Grid) -> list[dict[str, Any]]:
    """Where the plan has the sample, or pieces of it."""
    first, stop = steps
    view = PlanView(config, open_index(config))
    found = []
    with progress("looking for it", "steps") as show:
        for step in view.steps(grid, first, stop):
            for cell in step["cells"]:
                for pack in cell["packs"]:
                    found += [
                        {
                            "step": step["step"],
                            "micro_step": cell["micro_step"],
                            "dp_rank": cell["dp_rank"],
                            "pack_id": pack["pack_id"],
                            "number": pack["number"],
                            "sample_key": own,
                        }
                        for own in pack["sample_keys"]
                        if own.partition("[")[0] == key
                    ]
            show(step["step"] + 1 - first, stop - first, "")
    return found

"""What `dataservice replay` does: reads the state, has the packs built, writes and describes them.

Invariants: a pack is held while it is written and no longer; the table, --json and the files say
the same.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from dataservice.actors.offline import PlacedPack
from dataservice.actors.replaying import Replay
from dataservice.cli.pack_folder import PackFolder, described
from dataservice.cli.progress import Show, no_progress
from dataservice.config import Config
from dataservice.config.folders import check_writable
from dataservice.errors import ConfigError, WireError
from dataservice.wire.messages import ResumeState
from dataservice.wire.states import the_state_in

"""Of a digest, in the table."""


def read_state(path: str, named: str = "--state ") -> ResumeState:
    """The one state in a JSON file, however deep; ConfigError for a file without. `named` stands
    before the path in errors."""
    try:
        with open(path, "rb") as file:
            value = json.load(file)
    except OSError as error:
        raise ConfigError(f"{named}{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError):
        raise ConfigError(
            f"{named}{path} is no JSON: save stream.state_dict() with json.dump, or take it out "
            f"of a checkpoint of torch with `python -m trainer_client.saved_state {path}`"
        ) from None
    try:
        return the_state_in(value, name=path)
    except WireError as error:
        raise ConfigError(f"{named}{error}") from None


def replayed(
    config: Config,
    *,
    state: str,
    step: int,
    rank: int | None,
    holes: str | None,
    out: str | None,
    say: Callable[[str], None],
    show: Show = no_progress,
) -> Iterator[dict[str, Any]]:
    """One object a pack, in the order of micro-steps and ranks."""
    saved = read_state(state)
    if out is not None:
        check_writable("--out", out)
    with contextlib.closing(Replay(config, saved, holes=holes, say=say)) as replay:
        active = replay.step(step)
        told_by = replay.history.told_by
        say(f"holes: those of {told_by}" if told_by else "holes: none are recorded for this plan")
        rules = replay.config.plan.vision
        folder = None
        if out is not None:
            folder = PackFolder(out, replay.renderer, rules, with_arrays=True)
        ranks = range(saved.dp_size) if rank is None else (rank,)
        total = int(np.isin(active.dp_rank, ranks).sum())
        for number, pack in enumerate(replay.packs(active, rank), 1):
            row = described(step, pack)
            if folder is not None:
                folder.add(row, pack, name=_name(pack))
            show(number, total, row["pack_id"])
            yield row
        if folder is not None:
            about = {
                "step": step,
                "plan_digest": replay.plan_digest,
                "excluded": active.planned.next_cursor.excluded,
                "built_by": saved.decoder,
                "holes_of": told_by,
                "sizes": [saved.dp_size, saved.micro_steps, saved.packs_per_cell],
            }
            title = f"Step {step}, built again"
            page = folder.finish("replay.json", about, title=title, facts=_facts(about))
            say(f"written: {page}")


def _facts(about: dict[str, Any]) -> dict[str, str]:
    return {
        "plan": about["plan_digest"],
        "sizes": sizes_text(*about["sizes"]),
        "left out": about["excluded"] or "nothing",
        "built by": about["built_by"],
        "holes": f"those of {about['holes_of']}" if about["holes_of"] else "none are recorded",
    }


def sizes_text(dp_size: int, micro_steps: int, packs_per_cell: int) -> str:
    return f"DP {dp_size} x {micro_steps} micro-steps x packs_per_cell {packs_per_cell}"


def _name(pack: PlacedPack) -> str:
    return f"micro{pack.micro_step:03}-rank{pack.dp_rank:04}-{pack.place}"

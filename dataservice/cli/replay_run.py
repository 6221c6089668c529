"""What `dataservice replay` does: reads the state, has the packs built, writes and describes them.

Invariants: arrays are written without pickle; a pack is held while it is written and no longer;
the table, --json and the files say the same.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import orjson
from rich import box
from rich.table import Table

from dataservice.actors.replaying import Replay, ReplayedPack
from dataservice.cli.replay_page import index_page, pack_page
from dataservice.config import Config
from dataservice.config.folders import check_writable
from dataservice.errors import ConfigError, WireError
from dataservice.pipeline.documents import IGNORE
from dataservice.wire.codec import pack_digest
from dataservice.wire.messages import ResumeState
from dataservice.wire.states import the_state_in

_COLUMNS = ("micro", "rank", "pack", "number", "tokens", "loss\ntokens", "images", "holes")
DIGITS = 12
"""Of a digest, in the table."""


def read_state(path: str) -> ResumeState:
    """The one state in a JSON file, however deep; ConfigError for a file without."""
    try:
        with open(path, "rb") as file:
            value = json.load(file)
    except OSError as error:
        raise ConfigError(f"--state {path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError):
        raise ConfigError(
            f"--state {path} is no JSON: save stream.state_dict() with json.dump, or take it out "
            f"of a checkpoint of torch with `python -m trainer_client.saved_state {path}`"
        ) from None
    try:
        return the_state_in(value, name=path)
    except WireError as error:
        raise ConfigError(f"--state {error}") from None


def replayed(
    config: Config,
    *,
    state: str,
    step: int,
    rank: int | None,
    holes: str | None,
    out: str | None,
    say: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
    """One object a pack, in the order of micro-steps and ranks."""
    saved = read_state(state)
    if out is not None:
        check_writable("--out", out)
    with contextlib.closing(Replay(config, saved, holes=holes, say=say)) as replay:
        active = replay.step(step)
        told_by = replay.history.told_by
        say(f"holes: those of {told_by}" if told_by else "holes: none are recorded for this plan")
        rows = []
        for pack in replay.packs(active, rank):
            row = described(step, pack)
            if out is not None:
                row["file"] = _write(out, replay, row, pack)
            rows.append(row)
            yield row
        if out is not None:
            about = {
                "step": step,
                "plan_digest": replay.plan_digest,
                "excluded": active.planned.next_cursor.excluded,
                "built_by": saved.decoder,
                "holes_of": told_by,
                "sizes": [saved.dp_size, saved.micro_steps, saved.packs_per_cell],
            }
            with open(os.path.join(out, "replay.json"), "wb") as file:
                file.write(orjson.dumps({**about, "packs": rows}, option=orjson.OPT_INDENT_2))
            with open(os.path.join(out, "index.html"), "w", encoding="utf-8") as page:
                page.write(index_page(about, rows))
            say(f"written: {os.path.join(os.path.abspath(out), 'index.html')}")


def described(step: int, pack: ReplayedPack) -> dict[str, Any]:
    arrays, meta = pack.built.arrays, pack.built.meta
    return {
        "step": step,
        "micro_step": pack.micro_step,
        "dp_rank": pack.dp_rank,
        "place": pack.place,
        "pack_id": pack.spec.pack_id,
        "number": pack.number,
        "digest": pack_digest(arrays),
        "tokens": pack.spec.num_tokens,
        "loss_tokens": int((arrays["labels"] != IGNORE).sum()),
        "num_images": len(arrays["image_grid_thw"]),
        "sample_keys": list(meta["sample_keys"]),
        "holes": list(meta["holes"]),
    }


def _write(out: str, replay: Replay, row: dict[str, Any], pack: ReplayedPack) -> str:
    """The name of the files, without .npz or .html."""
    name = f"micro{pack.micro_step:03}-rank{pack.dp_rank:04}-{pack.place}"
    with open(os.path.join(out, f"{name}.npz"), "wb") as file:
        np.savez_compressed(file, allow_pickle=False, **pack.built.arrays)
    page = pack_page(row, pack, replay.renderer, replay.config.plan.vision)
    with open(os.path.join(out, f"{name}.html"), "w", encoding="utf-8") as text:
        text.write(page)
    return name


def step_table(step: int, rows: Sequence[dict[str, Any]]) -> Table:
    """One row a pack."""
    table = Table(
        title=f"step {step}: {len(rows)} packs, built again",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        expand=True,
    )
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("digest", no_wrap=True)
    table.add_column("samples", no_wrap=True, ratio=1)
    for row in rows:
        table.add_row(
            *(str(row[name]) for name in ("micro_step", "dp_rank", "pack_id", "number")),
            *(f"{row[name]:,}" for name in ("tokens", "loss_tokens", "num_images")),
            f"{len(row['holes']):,}",
            row["digest"][:DIGITS],
            f"{len(row['sample_keys'])}: {', '.join(row['sample_keys'])}",
        )
    return table

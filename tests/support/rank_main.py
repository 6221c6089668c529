"""Trainer ranks, forked from one process that has imported torch; ends them when its input ends.

Reads a JSON line of settings, then tells on standard output, as JSON lines, the process of each
rank and its exit code. A rank writes `rank-<r>.jsonl`, `rank-<r>.log` and, if its run ends in an
error, `rank-<r>.error`, all in the folder.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from trainer_client import MicroBatch, PackStream, ParallelLayout

PR_SET_PDEATHSIG = 1


def rank_run(rank: int, settings: dict[str, Any]) -> None:
    folder, micro_steps = Path(settings["folder"]), settings["micro_steps"]
    journal = os.open(folder / f"rank-{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with PackStream(
        settings["endpoints"].get(str(rank), settings["endpoint"]),
        job=settings["job"],
        layout=ParallelLayout.data_parallel(rank, settings["dp_size"]),
        micro_steps=micro_steps,
        run_id=settings["run_id"],
        timeout_s=settings["timeout_s"],
        digests=True,
        local=settings["local"][rank],
        prefetch_packs=settings["prefetch_packs"],
    ) as stream:
        if settings["states"] is not None:
            stream.load_state_dict(_state(Path(settings["states"]), rank))
        left = None if settings["steps"] is None else settings["steps"] * micro_steps
        while left is None or left > 0:
            batch = next(stream, None)
            if batch is None:
                break
            os.write(journal, _line(rank, batch))
            every = settings["save_every"]
            if every and batch.is_last_micro_step and (batch.step + 1) % every == 0:
                _save(folder / "states" / f"step-{batch.step + 1}", rank, stream.state_dict())
            time.sleep(settings["pause_s"])
            if left is not None:
                left -= 1
        stats = stream.stats()
    (folder / f"rank-{rank}.stats.json").write_text(
        json.dumps({name: getattr(stats, name) for name in stats.__slots__})
    )


def _line(rank: int, batch: MicroBatch) -> bytes:
    meta = batch.meta
    found = {
        "step": batch.step,
        "micro_step": batch.micro_step,
        "dp_rank": rank,
        "pack_ids": meta["pack_ids"],
        "numbers": meta["pack_numbers"],
        "digests": meta["digests"],
        "sample_keys": meta["sample_keys"],
        "loss_tokens": meta["loss_tokens"],
        "holes": list(meta["holes"]),
        "waited_s": meta["waited_s"],
        "at": time.monotonic(),
    }
    return (json.dumps(found) + "\n").encode()


def _state(folder: Path, rank: int) -> dict[str, Any]:
    """The rank's own, or that of rank 0: they are the same at the same place."""
    own = folder / f"rank-{rank}.json"
    path = own if own.exists() else folder / "rank-0.json"
    state: dict[str, Any] = json.loads(path.read_text())
    return state


def _save(folder: Path, rank: int, state: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    half = folder / f"rank-{rank}.half"
    half.write_text(json.dumps(state))
    half.rename(folder / f"rank-{rank}.json")


def _be_rank(rank: int, settings: dict[str, Any]) -> int:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    folder = Path(settings["folder"])
    log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    torch.set_num_threads(1)
    try:
        rank_run(rank, settings)
        return 0
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    except BaseException as error:
        traceback.print_exc()
        (folder / f"rank-{rank}.error").write_text(f"{type(error).__name__}: {error}")
        return 1


def _tell(**line: Any) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def main() -> None:
    settings = json.loads(sys.stdin.readline() or "null")
    if settings is None:
        return
    pids: dict[int, int] = {}
    for rank in range(settings["dp_size"]):
        pid = os.fork()
        if pid == 0:
            os._exit(_be_rank(rank, settings))
        pids[pid] = rank
        _tell(rank=rank, pid=pid)

    def wait_for_parent() -> None:
        sys.stdin.read()
        for pid in list(pids):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    threading.Thread(target=wait_for_parent, name="parent", daemon=True).start()
    while pids:
        pid, status = os.wait()
        with suppress(BrokenPipeError):
            _tell(rank=pids.pop(pid), code=os.waitstatus_to_exitcode(status))
    os._exit(0)  # the reading thread holds the input


if __name__ == "__main__":
    main()

"""Trainer ranks as real processes that write down what they were given.

Invariants: every rank ends with the block; what `deliveries` gives is what a rank's trainer had in
hand before it asked for more; a rank that fails says why in `errors`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from support.harness import Delivery

ROOT = Path(__file__).parents[2]
MAIN = Path(__file__).with_name("rank_main.py")
START_S = 60.0


class RankProcesses:
    """Starts them; they run `steps` steps each (None: to the end of the data)."""

    def __init__(
        self,
        endpoint: str,
        folder: Path,
        *,
        job: str,
        dp_size: int,
        micro_steps: int,
        steps: int | None,
        run_id: str | None = None,
        states: Path | None = None,
        save_every: int = 0,
        pause_s: float = 0.0,
        timeout_s: float = 60.0,
        endpoints: Mapping[int, str] | None = None,
        local: bool = True,
        grpc_ranks: Sequence[int] = (),
        prefetch_packs: int | None = 4,
    ) -> None:
        """`states`: folder of saved states to resume from, as `last_state` gives it; `save_every`:
        steps between two states, 0 saves none; `pause_s`: the trainer's work on a micro-batch;
        `endpoints`: the coordinator's for some ranks, such as a proxy's; `grpc_ranks`: those that
        fetch over gRPC although `local`."""
        self.folder, self.dp_size = folder, dp_size
        self.codes: dict[int, int] = {}
        """Exit codes of ranks that have ended; the negative of a signal that ended one."""
        self.pids: dict[int, int] = {}
        folder.mkdir(parents=True, exist_ok=True)
        settings = {
            "endpoint": endpoint,
            "endpoints": {} if endpoints is None else dict(endpoints),
            "folder": str(folder),
            "job": job,
            "dp_size": dp_size,
            "micro_steps": micro_steps,
            "steps": steps,
            "run_id": uuid.uuid4().hex if run_id is None else run_id,
            "states": None if states is None else str(states),
            "save_every": save_every,
            "pause_s": pause_s,
            "timeout_s": timeout_s,
            "local": [local and rank not in grpc_ranks for rank in range(dp_size)],
            "prefetch_packs": prefetch_packs,
        }
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
            "OMP_NUM_THREADS": "1",
            "DATASERVICE_LOG": "INFO",
        }
        with (folder / "ranks.log").open("ab") as log:
            self._launcher = subprocess.Popen(
                [sys.executable, str(MAIN)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                bufsize=1,
            )
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, name="rank exits")
        self._reader.start()
        try:
            assert self._launcher.stdin is not None
            self._launcher.stdin.write(json.dumps(settings) + "\n")
            self._launcher.stdin.flush()
            with self._changed:
                started = self._changed.wait_for(lambda: len(self.pids) == dp_size, START_S)
            assert started, f"ranks did not start within {START_S:g} s: {self._log('ranks')}"
        except BaseException:
            self.close()
            raise

    def _read(self) -> None:
        assert self._launcher.stdout is not None
        for line in self._launcher.stdout:
            told = json.loads(line)
            with self._changed:
                if "pid" in told:
                    self.pids[told["rank"]] = told["pid"]
                else:
                    self.codes[told["rank"]] = told["code"]
                self._changed.notify_all()

    # ---- what tests do with them -----------------------------------------------------------------

    def signal(self, rank: int, sig: int) -> None:
        """No error for a rank that has ended."""
        if rank not in self.codes:
            with suppress(ProcessLookupError):
                os.kill(self.pids[rank], sig)

    def wait(self, timeout_s: float) -> dict[int, int]:
        """Exit codes of all ranks, once they have ended; AssertionError names those that run on."""
        with self._changed:
            self._changed.wait_for(lambda: len(self.codes) == self.dp_size, timeout_s)
        running = sorted(set(range(self.dp_size)) - set(self.codes))
        if running:
            self._print_logs(running)
            raise AssertionError(f"ranks {running} have not ended within {timeout_s:g} s")
        self._print_logs([rank for rank, code in self.codes.items() if code == 1])
        return dict(self.codes)

    @property
    def running(self) -> bool:
        return len(self.codes) < self.dp_size

    def wait_for_step(self, step: int, timeout_s: float = 60.0) -> None:
        """Until every rank has all of `step`'s micro-batches before its last."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            reached = {d.dp_rank for d in self.deliveries() if d.step >= step}
            if len(reached) == self.dp_size:
                return
            if len(self.codes) == self.dp_size:
                break
            time.sleep(0.05)
        raise AssertionError(f"not all ranks came to step {step}: {self.errors} {self.codes}")

    def deliveries(self) -> list[Delivery]:
        """What all ranks have got so far, in the order of each."""
        return [delivery for rank in range(self.dp_size) for delivery in self._of_rank(rank)]

    def _of_rank(self, rank: int) -> list[Delivery]:
        path = self.folder / f"rank-{rank}.jsonl"
        if not path.exists():
            return []
        whole, _, _torn = path.read_text().rpartition("\n")
        return [_delivery(json.loads(line)) for line in whole.splitlines()]

    def last_state(self) -> Path | None:
        """Folder of the newest states that every rank has saved."""
        found = [
            (int(folder.name.removeprefix("step-")), folder)
            for folder in (self.folder / "states").glob("step-*")
            if len(list(folder.glob("rank-*.json"))) == self.dp_size
        ]
        return max(found)[1] if found else None

    def stats(self, rank: int) -> dict[str, Any]:
        """The stream's, of a rank that came to its end."""
        stats: dict[str, Any] = json.loads((self.folder / f"rank-{rank}.stats.json").read_text())
        return stats

    @property
    def errors(self) -> dict[int, str]:
        """ "ErrorClass: its text" of ranks whose run ended in one."""
        paths = {rank: self.folder / f"rank-{rank}.error" for rank in range(self.dp_size)}
        return {rank: path.read_text() for rank, path in paths.items() if path.exists()}

    def _log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def _print_logs(self, ranks: list[int]) -> None:
        for rank in ranks:
            print(f"---- rank {rank}\n{self._log(f'rank-{rank}')[-4000:]}")

    # ---- ending ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Kills those that still run."""
        for rank in list(self.pids):
            self.signal(rank, signal.SIGKILL)
        assert self._launcher.stdin is not None
        assert self._launcher.stdout is not None
        with suppress(BrokenPipeError):
            self._launcher.stdin.close()
        try:
            self._launcher.wait(10)
        except subprocess.TimeoutExpired:
            self._launcher.kill()
            self._launcher.wait()
        self._reader.join()
        self._launcher.stdout.close()

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _delivery(line: dict[str, Any]) -> Delivery:
    return Delivery(
        step=line["step"],
        micro_step=line["micro_step"],
        dp_rank=line["dp_rank"],
        pack_ids=tuple(line["pack_ids"]),
        numbers=tuple(line["numbers"]),
        digests=tuple(line["digests"]),
        sample_keys=tuple(tuple(keys) for keys in line["sample_keys"]),
        loss_tokens=line["loss_tokens"],
        holes=tuple(line["holes"]),
        waited_s=line["waited_s"],
        at=line["at"],
    )

"""What a fault does to the processes and connections of a chaos run, and how what lasts ends.

Invariants: whatever was stopped, frozen, refused, slowed or filled is let go after its time, and by
`close` at the latest; half-open connections stay so until those who use them notice.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP, SIGTERM
from typing import Any

import psutil
from chaos.faults import Fault
from chaos.job import NODES, Job
from support import small_disk
from support.proxy import Proxy
from support.rank_processes import RankProcesses
from support.service_processes import ServiceProcesses, free_port

WORKER_HOST = "127.0.0.2"
"""Workers listen at 127.0.0.1 and are known by this address, where proxies pass on to them."""
WORKERS = 3
TROUBLE = {
    "origin fails": {"share": 0.5, "delay_s": 0.0, "errno": errno.EIO},
    "origin slow": {"share": 0.5, "delay_s": 1.0, "errno": 0},
}

Undo = Callable[[], object]


class Targets:
    """The service with proxies before the coordinator (one for each half of the ranks, one for the
    members of each node) and before each worker."""

    def __init__(self, job: Job, folder: Path) -> None:
        self._job = job
        port = free_port()
        here = f"127.0.0.1:{port}"
        self._workers: dict[str, Proxy] = {}
        self._ranks = [Proxy(here), Proxy(here)]
        self._members = {node: Proxy(here) for node in NODES}
        self.ranks: RankProcesses | None = None
        try:
            self.service = ServiceProcesses(
                job.config,
                folder,
                workers=WORKERS,
                nodes=NODES,
                port=port,
                coordinators={node: proxy.endpoint for node, proxy in self._members.items()},
                worker_options=self._before_worker,
                environment=job.environment,
            )
        except BaseException:
            self._close_proxies()
            raise

    def _before_worker(self, name: str) -> dict[str, Any]:
        """A proxy of its own before it."""
        port = free_port()
        self._workers[name] = Proxy(f"127.0.0.1:{port}", host=WORKER_HOST, port=port)
        return {"bind": f"127.0.0.1:{port}", "advertise": WORKER_HOST}

    def coordinator_of_rank(self, rank: int) -> str:
        return self._ranks[rank % len(self._ranks)].endpoint

    @property
    def proxies(self) -> list[Proxy]:
        return [*self._ranks, *self._members.values(), *self._workers.values()]

    # ---- faults ----------------------------------------------------------------------------------

    def strike(self, fault: Fault) -> tuple[str, Undo | None]:
        """Whom it hit, and what ends it."""
        what, _, how = fault.kind.name.partition(" ")
        if what in ("worker", "stager", "coordinator") and how != "joins":
            return self._hit_process(what, how, fault)
        return {
            "worker": self._join,
            "planner": self._kill_planner,
            "node": self._hit_node,
            "rank": self._hit_rank,
            "connections": self._hit_connections,
            "origin": self._hit_origin,
            "disk": self._fill_disk,
        }[what](how, fault)

    def _hit_process(self, what: str, how: str, fault: Fault) -> tuple[str, Undo | None]:
        names = sorted(name for name in self.service.pids if name.startswith(what))
        if not names:
            return f"no {what} was there", None
        name = _pick(names, fault)
        return name, self._signal(name, how)

    def _signal(self, name: str, how: str) -> Undo | None:
        sig = {"killed": SIGKILL, "stopped": SIGSTOP, "told to end": SIGTERM}[how]
        with suppress(KeyError):  # it has left
            self.service.signal(name, sig)
        return (lambda: self._go_on(name)) if how == "stopped" else None

    def _go_on(self, name: str) -> None:
        with suppress(KeyError):
            self.service.signal(name, SIGCONT)

    def _join(self, how: str, fault: Fault) -> tuple[str, Undo | None]:
        name = self.service.add_worker(_pick(NODES, fault))
        return name, lambda: self._leave(name)

    def _leave(self, name: str) -> None:
        self.service.remove(name)
        self._workers.pop(name).close()

    def _kill_planner(self, how: str, fault: Fault) -> tuple[str, Undo | None]:
        with suppress(KeyError, psutil.Error):
            coordinator = psutil.Process(self.service.pids["coordinator"])
            for child in coordinator.children():
                if "dataservice.actors.planner" in child.cmdline():
                    child.kill()
                    return f"process {child.pid}", None
        return "no planner was there", None

    def _hit_node(self, how: str, fault: Fault) -> tuple[str, Undo | None]:
        node = _pick(NODES, fault)
        names = [f"stager-{node}", *self._workers_of(node)]
        undo = [self._signal(name, how) for name in names]
        return node, lambda: [end() for end in undo if end is not None]

    def _workers_of(self, node: str) -> list[str]:
        numbers = range(NODES.index(node), WORKERS, len(NODES))
        return [f"worker-{number}" for number in numbers]

    def _hit_rank(self, how: str, fault: Fault) -> tuple[str, Undo | None]:
        ranks = self.ranks
        assert ranks is not None
        rank = _pick(range(ranks.dp_size), fault)
        ranks.signal(rank, {"killed": SIGKILL, "stopped": SIGSTOP, "told to end": SIGTERM}[how])
        return f"rank {rank}", (lambda: ranks.signal(rank, SIGCONT)) if how == "stopped" else None

    def _hit_connections(self, how: str, fault: Fault) -> tuple[str, Undo | None]:
        proxy = _pick(self.proxies, fault)
        undo: Undo | None = None
        if how == "reset":
            proxy.reset()
        elif how == "frozen":
            proxy.freeze()
            undo = proxy.thaw
        elif how == "half open":
            proxy.drop()
        elif how == "refused":
            proxy.refuse()
            proxy.reset()
            undo = partial(proxy.refuse, False)
        elif how == "slow":
            proxy.delay(0.02 + 0.2 * fault.amount)
            undo = partial(proxy.delay, 0.0)
        else:
            proxy.cut_after(int(200_000 * fault.amount))
        return self._name_of(proxy), undo

    def _name_of(self, proxy: Proxy) -> str:
        names = {
            id(p): f"of ranks {i}, {i + 2} ... to coordinator" for i, p in enumerate(self._ranks)
        }
        names |= {id(p): f"of node {node} to coordinator" for node, p in self._members.items()}
        names |= {id(p): f"of ranks to {name}" for name, p in self._workers.items()}
        return names[id(proxy)]

    def _hit_origin(self, how: str, fault: Fault) -> tuple[str, Undo | None]:
        half = self._job.trouble.with_suffix(".half")
        half.write_text(json.dumps(TROUBLE[fault.kind.name]))
        half.rename(self._job.trouble)
        return "", lambda: self._job.trouble.unlink(missing_ok=True)

    def _fill_disk(self, how: str, fault: Fault) -> tuple[str, Undo | None]:
        assert self._job.config.staging.cache_dir is not None
        disk = Path(self._job.config.staging.cache_dir)
        small_disk.fill(disk)
        return "", lambda: small_disk.free(disk)

    # ---- memory and end --------------------------------------------------------------------------

    def memory(self) -> dict[str, int]:
        """Resident bytes of each process that runs, by name."""
        pids = dict(self.service.pids)
        if self.ranks is not None:
            pids |= {
                f"rank {r}": pid for r, pid in self.ranks.pids.items() if r not in self.ranks.codes
            }
        found = {}
        for name, pid in pids.items():
            with suppress(psutil.Error, OSError):
                found[name] = psutil.Process(pid).memory_info().rss
                if name == "coordinator":
                    children = psutil.Process(pid).children()
                    found["planner"] = max((c.memory_info().rss for c in children), default=0)
        return found

    def close(self) -> None:
        if self.ranks is not None:
            self.ranks.close()
        for proxy in self.proxies:
            proxy.heal()
        try:
            self.service.close()
        finally:
            self._close_proxies()

    def _close_proxies(self) -> None:
        for proxy in self.proxies:
            proxy.close()


def _pick(those: Sequence[Any], fault: Fault) -> Any:
    return those[int(fault.target * len(those))]

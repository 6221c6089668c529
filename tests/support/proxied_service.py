"""A service of which every connection goes through a proxy of its own: trainers to coordinator,
workers to coordinator, trainers to each worker."""

from __future__ import annotations

import gc
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from dataservice.config import Config
from support.local_service import LocalService
from support.message_proxy import MessageProxy
from support.proxy import Proxy
from support.worker_process import WorkerProcesses


class ProxiedService:
    """Coordinator in a thread, workers as processes. `host`: where the trainers' proxies listen;
    `shares`: see MessageProxy, of the messages of trainers and workers alike."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        *,
        workers: int = 2,
        host: str = "127.0.0.1",
        **shares: Any,
    ) -> None:
        self.data: dict[str, Proxy] = {}
        """To each worker, by the endpoint that trainers know."""
        self._host, self._lock = host, threading.Lock()
        self._ends = ExitStack()
        with ExitStack() as ends:
            self.service = ends.enter_context(LocalService(config, workers=0))
            ends.callback(self._close_data)
            self.messages = ends.enter_context(
                MessageProxy(self.service.endpoint, via=self._data_proxy, **shares)
            )
            self.members = ends.enter_context(Proxy(self.messages.endpoint))
            self.control = ends.enter_context(Proxy(self.messages.endpoint, host=host))
            self.processes = ends.enter_context(
                WorkerProcesses(
                    self.members.endpoint,
                    count=workers,
                    memory_bytes=None,
                    codecs=[],
                    folder=folder,
                )
            )
            self._ends = ends.pop_all()

    @property
    def endpoint(self) -> str:
        """For trainers."""
        return self.control.endpoint

    def status(self) -> dict[str, Any]:
        return self.service.status()

    def all_proxies(self) -> list[Proxy]:
        with self._lock:
            return [self.control, self.members, *self.data.values()]

    def _data_proxy(self, target: str) -> str:
        with self._lock:
            for proxy in self.data.values():
                if proxy.target == target:
                    return proxy.endpoint
            proxy = Proxy(target, host=self._host)
            self.data[proxy.endpoint] = proxy
            return proxy.endpoint

    def _close_data(self) -> None:
        for proxy in self.data.values():
            proxy.close()

    def __enter__(self) -> ProxiedService:
        return self

    def __exit__(self, *exc: Any) -> None:
        self._ends.__exit__(*exc)
        del self.messages  # gRPC's thread ends with the last of its servers
        gc.collect()

"""A coordinator whose process kills itself at the first write to its state folder that none of its
predecessors died at, until there is none left, while others read from it.

A point has a name: what is written (the owner's file, the journal or the one that takes its place,
and there the kind of record), and which call is next: the write itself, its second half, the fsync,
the rename. At first it dies of a new session's records alone, at all points once `arm`
was called.
`python tests/support/dying_coordinator.py CONFIG.json PORT DEATHS` is one life of it.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dataservice.config import Config, config_to_json

STOP_S = 10.0


class DyingCoordinator:
    """Kept running, always at the same port, until the block ends."""

    def __init__(self, config: Config, folder: Path, *, port: int) -> None:
        self.endpoint = f"127.0.0.1:{port}"
        self.exits: list[int] = []
        self._deaths = folder / "deaths"
        self._deaths.touch()
        (folder / "config.json").write_text(config_to_json(config))
        self._log = (folder / "coordinator.log").open("ab")
        self._command = [
            *(sys.executable, __file__, str(folder / "config.json")),
            *(str(port), str(self._deaths)),
        ]
        self._closing = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="keeper")

    @property
    def deaths(self) -> list[str]:
        """Names of the points at which it died, in order."""
        return self._deaths.read_text().split()

    def arm(self) -> None:
        self._deaths.with_name("armed").touch()

    def _keep(self) -> None:
        while not self._closing.is_set():
            process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stderr=self._log)
            assert process.stdin is not None
            while process.poll() is None and not self._closing.wait(0.02):
                pass
            process.stdin.close()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
            self.exits.append(process.wait())

    def __enter__(self) -> DyingCoordinator:
        self._keeper.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._closing.set()
        self._keeper.join()
        self._log.close()
        if kind is not None:
            print(self.deaths, Path(self._log.name).read_text()[-5000:])


class _Points:
    def __init__(self, folder: str, deaths: Path) -> None:
        self._folder = folder
        self._deaths, self._armed = deaths, deaths.with_name("armed")
        self._known = set(deaths.read_text().split())
        self._kind = ""

    def _here(self, name: str) -> None:
        armed = name.startswith(("journal:session:", "journal:homes:")) or self._armed.exists()
        if armed and name not in self._known:
            with self._deaths.open("a") as file:
                file.write(f"{name}\n")
            os.kill(os.getpid(), signal.SIGKILL)

    def _file(self, fd: int) -> str:
        """Name of a file of the folder, "" of any other."""
        path = os.readlink(f"/proc/self/fd/{fd}")
        if path == self._folder:
            return "folder"
        if os.path.dirname(path) != self._folder:
            return ""
        name = os.path.basename(path)
        if name == "coordinator.owner":
            return ""  # a sign of life
        name = re.sub(r"owner\..*", "owner", name).removeprefix("coordinator.")
        return re.sub(r"journal\.[0-9a-f]+\.new", "journal.new", name)

    def install(self) -> None:
        for name in ("fsync", "ftruncate"):
            setattr(os, name, self._on_descriptor(name, getattr(os, name)))
        for name in ("rename", "replace"):
            setattr(os, name, self._on_path(name, getattr(os, name)))
        os.pwrite = self._written(os.pwrite)

    def _on_descriptor(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(fd: int, *arguments: Any) -> Any:
            if file := self._file(fd):
                self._here(f"{file}:{self._kind}:{name}")
            return call(fd, *arguments)

        return counted

    def _on_path(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(source: Any, target: Any) -> Any:
            if os.path.dirname(target) == self._folder:
                self._here(f"{os.path.basename(target).removeprefix('coordinator.')}:{name}")
            return call(source, target)

        return counted

    def _written(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(fd: int, data: Any, offset: int) -> Any:
            if file := self._file(fd):
                found = re.search(rb"\xa4kind.([a-z]+)", bytes(data))
                self._kind = found[1].decode() if found else "head"
                self._here(f"{file}:{self._kind}:write")
                half = memoryview(data).cast("B")[: len(data) // 2]
                if f"{file}:{self._kind}:half" not in self._known:
                    call(fd, half, offset)
                self._here(f"{file}:{self._kind}:half")
            return call(fd, data, offset)

        return counted


def main() -> None:
    from support import service_main

    config, port, deaths = Path(sys.argv[1]).read_text(), int(sys.argv[2]), Path(sys.argv[3])
    service_main.set_up_logs()
    folder = os.path.realpath(service_main.config_from_json(config).state_dir)
    _Points(folder, deaths).install()
    asyncio.run(service_main.coordinate(config, port=port))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()

"""Machines that are namespaces of Linux: a host name, an address and processes of their own each,
joined by a bridge; the file system is shared, as on a cluster.

Invariants: namespaces, bridge and every process on them are gone at the end of the block, by their
own names; nothing else of this computer's network is touched.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

_NUMBERS = itertools.count()
COMMAND_S = 20.0

# The first process there; a shell, so that it takes in whoever lost its parent.
_FIRST = 'hostname "$1" && mount --bind "$2" /etc/hosts && echo up; while :; do sleep 60; done'


def lacks() -> str:
    """Why there are no such machines here; "" where there are."""
    for program in ("ip", "nsenter", "unshare"):
        if shutil.which(program) is None:
            return f"the program `{program}` is not installed"
    try:
        with Machines("one", "two") as machines:
            machines.run("one", ["true"], check=True, capture_output=True)
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        return f"namespaces are not permitted: {detail}"
    return ""


class Machines:
    """By host name; `address` of one is what the others reach it at."""

    def __init__(self, *names: str) -> None:
        number = next(_NUMBERS)
        self._prefix = f"m{os.getpid()}x{number}"
        net = f"10.{100 + number % 50}.{os.getpid() % 250}"
        self.address = {name: f"{net}.{place}" for place, name in enumerate(names, 1)}
        self._spaces: list[str] = []
        self._first: dict[str, subprocess.Popen[str]] = {}
        self._pids: dict[str, str] = {}
        """Of the first process of each, as this side numbers it."""
        self._processes: list[subprocess.Popen[bytes]] = []
        self._folder = Path(tempfile.mkdtemp(prefix="machines-"))
        self._hosts = self._folder / "hosts"

    def __enter__(self) -> Machines:
        lines = [f"{address} {name}\n" for name, address in self.address.items()]
        self._hosts.write_text("".join(["127.0.0.1 localhost\n", *lines]))
        try:
            self._add_space("hub")
            hub = self._space("hub")
            _ip("-n", hub, "link", "add", "hub", "type", "bridge")
            _ip("-n", hub, "link", "set", "hub", "up")
            for place, (name, address) in enumerate(self.address.items()):
                self._add_space(name)
                inside = ("-n", self._space(name))
                here = ("link", "add", "eth0", "netns", self._space(name), "type", "veth")
                _ip(*here, "peer", "name", f"port{place}", "netns", hub)
                _ip("-n", hub, "link", "set", f"port{place}", "master", "hub", "up")
                _ip(*inside, "address", "add", f"{address}/24", "dev", "eth0")
                _ip(*inside, "link", "set", "eth0", "up")
                self._boot(name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for first in self._first.values():
            first.kill()  # and with it all other processes of the machine
        for process in (*self._first.values(), *self._processes):
            process.wait()
        for name in self._spaces:
            with suppress(subprocess.SubprocessError):
                _ip("netns", "del", self._space(name))
        shutil.rmtree(self._folder, ignore_errors=True)

    def start(
        self, name: str, command: Sequence[str], *, log: IO[bytes], env: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """A process that lives no longer than the block; nor does what it starts."""
        process = subprocess.Popen(
            [*self._command(name), *command],
            env=dict(env),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._processes.append(process)
        return process

    def run(
        self, name: str, command: Sequence[str], **options: Any
    ) -> subprocess.CompletedProcess[Any]:
        """As subprocess.run."""
        options = {"timeout": COMMAND_S, "check": False, **options}
        folder = f"--wd={Path(options.get('cwd', '/')).resolve()}"
        return subprocess.run([*self._command(name), folder, *command], **options)

    def _boot(self, name: str) -> None:
        enter = ["nsenter", f"--net=/run/netns/{self._space(name)}"]
        apart = ["unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        first = subprocess.Popen(
            [*enter, *apart, "bash", "-c", _FIRST, "bash", name, str(self._hosts)],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._first[name] = first
        assert first.stdout is not None
        with first.stdout as said:
            if said.readline() != "up\n":
                raise OSError(f"the machine {name} did not start")
        (self._pids[name],) = (
            Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
        )

    def _command(self, name: str) -> list[str]:
        return ["nsenter", f"--target={self._pids[name]}", "--net", "--uts", "--mount", "--pid"]

    def _space(self, name: str) -> str:
        return f"{self._prefix}-{name}"

    def _add_space(self, name: str) -> None:
        _ip("netns", "add", self._space(name))
        self._spaces.append(name)
        _ip("-n", self._space(name), "link", "set", "lo", "up")


def _ip(*arguments: str) -> None:
    subprocess.run(
        ["ip", *arguments], check=True, capture_output=True, text=True, timeout=COMMAND_S
    )

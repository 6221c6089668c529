"""A network namespace of Linux, connected to this one by a cable that can be pulled.

Invariants: namespace and cable are gone at the end of the block, by their own names; nothing else
of this machine's network is touched.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

_NUMBERS = itertools.count()
COMMAND_S = 20.0
NOBODY = "02:00:00:00:00:99"
"""A hardware address that no end of a cable has."""


def lacks() -> str:
    """Why there are no namespaces here; "" where there are."""
    if shutil.which("ip") is None:
        return "the program `ip` is not installed"
    try:
        with Namespace() as namespace:
            namespace.pull()
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        return f"network namespaces are not permitted: {detail}"
    return ""


class Namespace:
    """`command` runs something in it; `host` is this side's address, as it is seen from there."""

    def __init__(self) -> None:
        number = next(_NUMBERS)
        self.name = f"packs-{os.getpid()}-{number}"
        self._here, self._there = f"pk{os.getpid()}h{number}", f"pk{os.getpid()}t{number}"
        net = f"10.{200 + number % 50}.{os.getpid() % 250}"
        self.host, self._inside = f"{net}.1", f"{net}.2"

    def __enter__(self) -> Namespace:
        try:
            _ip("netns", "add", self.name)
            _ip("link", "add", self._here, "type", "veth", "peer", "name", self._there)
            _ip("link", "set", self._there, "netns", self.name)
            _ip("address", "add", f"{self.host}/24", "dev", self._here)
            _ip("link", "set", self._here, "up")
            inside = ("-n", self.name)
            _ip(*inside, "address", "add", f"{self._inside}/24", "dev", self._there)
            _ip(*inside, "link", "set", self._there, "up")
            _ip(*inside, "link", "set", "lo", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(
            ["ip", "link", "del", self._here], capture_output=True, timeout=COMMAND_S, check=False
        )
        subprocess.run(
            ["ip", "netns", "del", self.name], capture_output=True, timeout=COMMAND_S, check=False
        )

    @property
    def command(self) -> list[str]:
        """Before a program and its arguments."""
        return ["ip", "netns", "exec", self.name]

    def pull(self) -> None:
        """Packets of both directions go to nobody; neither end is told."""
        for neighbour in self._neighbours():
            _ip(*neighbour("replace"), "lladdr", NOBODY, "nud", "permanent")

    def plug(self) -> None:
        for neighbour in self._neighbours():
            _ip(*neighbour("del"))

    def down(self) -> None:
        """The kernels are told: no carrier."""
        _ip("link", "set", self._here, "down")

    def up(self) -> None:
        _ip("link", "set", self._here, "up")

    def _neighbours(self) -> list[Callable[[str], list[str]]]:
        return [
            lambda do: ["neigh", do, self._inside, "dev", self._here],
            lambda do: ["-n", self.name, "neigh", do, self.host, "dev", self._there],
        ]


def _ip(*arguments: Any) -> None:
    subprocess.run(
        ["ip", *arguments], check=True, capture_output=True, text=True, timeout=COMMAND_S
    )

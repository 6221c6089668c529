"""Runs `dataservice lint` in this process for each file named, and tells what it did besides.

    python watched_lint.py FILE...

Prints a JSON object a file: rc, rows, opened (files opened for reading, but for Python's own),
wrote (everything that changes a disk), net (sockets), seconds; then {"peak_mb": ...}.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
from pathlib import Path

_CHANGES = (
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.truncate",
    "os.link",
    "os.symlink",
)
_NET = ("socket.connect", "socket.bind", "socket.getaddrinfo", "socket.sendto")
_STARTS = ("subprocess.Popen", "os.exec", "os.fork", "os.posix_spawn", "os.system")
_OWN = (sys.prefix, sys.base_prefix, str(Path(__file__).resolve().parents[2]), "/usr", "/proc")

opened: list[str] = []
wrote: list[str] = []
net: list[str] = []
watching = False


def watch(event: str, arguments: tuple[object, ...]) -> None:
    if not watching:
        return
    if event == "open":
        path, mode, flags = arguments
        name = os.path.realpath(os.fsdecode(path)) if isinstance(path, str | bytes) else str(path)
        if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            wrote.append(f"{name} {mode}")
        elif isinstance(path, str | bytes) and not name.startswith(_OWN):
            opened.append(name)
    elif event in _CHANGES or event in _STARTS:
        wrote.append(f"{event} {arguments!r}")
    elif event in _NET:
        net.append(f"{event} {arguments!r}")


def main() -> None:
    global watching
    from dataservice.cli import main as dataservice

    sys.addaudithook(watch)
    for name in sys.argv[1:]:
        for seen in (opened, wrote, net):
            seen.clear()
        out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
        start, rc = time.monotonic(), 0
        watching = True
        try:
            with contextlib.redirect_stdout(out):
                dataservice(["lint", "--json", "--digest", name])
        except SystemExit as stopped:
            rc = int(stopped.code or 0)
        watching = False
        out.flush()
        told = {
            "file": name,
            "rc": rc,
            "rows": [json.loads(line) for line in out.buffer.getvalue().splitlines()],
            "opened": sorted(set(opened)),
            "wrote": wrote,
            "net": net,
            "seconds": time.monotonic() - start,
        }
        print(json.dumps(told))
    status = Path("/proc/self/status").read_text()
    peak_kb = int(status.split("VmHWM:")[1].split()[0])
    print(json.dumps({"peak_mb": peak_kb / 1024}))


if __name__ == "__main__":
    main()

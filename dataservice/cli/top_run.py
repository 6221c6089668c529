"""The loop of `dataservice top`: asks in a thread of its own, draws, and listens for keys.

Invariants: the terminal is left as it was found, however the loop ends; a key is answered at once,
also while the service does not; the thread ends with the loop.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import orjson
from rich.console import Console, RenderableType
from rich.live import Live

from dataservice.cli.top_view import view_of
from dataservice.errors import AccessRefused, DataServiceError
from dataservice.rpc.client import CoordinatorClient
from dataservice.rpc.security import ClientSecurity
from dataservice.wire.messages import GetStatus, StatusReport

CALL_TIMEOUT_S = 5.0
REDRAW_S = 0.2
PRINTED_ROWS = 50
"""Of a look, where it is not drawn on a terminal."""
QUIT = b"qQ\x03\x04"
"""The last two are Ctrl-C and Ctrl-D, where the terminal sends them as keys."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """Up to now."""

    report: dict[str, Any] | None = None
    at: float = 0.0
    """When it came; monotonic."""
    trouble: str = ""
    """Why it was not answered last time."""
    refused: AccessRefused | None = None
    """Which does not pass."""
    number: int = 0
    """Of questions that were answered, one way or the other."""

    @property
    def silent_s(self) -> float:
        return 0.0 if self.report is None else time.monotonic() - self.at


class Asker:
    """Asks every `every_s` seconds; `seen` may be read from any thread."""

    def __init__(self, endpoint: str, security: ClientSecurity, every_s: float) -> None:
        self.seen = Seen()
        self._every_s = every_s
        self._client = CoordinatorClient(endpoint, security)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="top")

    def __enter__(self) -> Asker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._client.close()  # ends a call that is under way
        self._thread.join(CALL_TIMEOUT_S)

    def _run(self) -> None:
        while not self._stopping.is_set():
            began = time.monotonic()
            self.seen = self._asked()
            self._stopping.wait(max(0.0, began + self._every_s - time.monotonic()))

    def _asked(self) -> Seen:
        seen = replace(self.seen, number=self.seen.number + 1)
        try:
            answer: StatusReport = self._client.call(GetStatus(), CALL_TIMEOUT_S)
        except AccessRefused as error:
            return replace(seen, refused=error)
        except DataServiceError as error:
            return replace(seen, trouble=str(error))
        report = orjson.loads(answer.status)
        return replace(seen, report=report, at=time.monotonic(), trouble="")


def watch(endpoint: str, security: ClientSecurity, *, every_s: float) -> None:
    """Until q or Ctrl-C; prints one look where standard output is no terminal. Raises ConfigError
    for what is no endpoint, and AccessRefused."""
    console = Console()
    if not console.is_terminal:
        print_looks(endpoint, security, every_s=every_s, count=1, as_json=False)
        return
    with (
        Asker(endpoint, security, every_s) as asker,
        _keys() as pressed,
        Live(console=console, screen=True, auto_refresh=False) as live,
        contextlib.suppress(KeyboardInterrupt),
    ):
        while not pressed(REDRAW_S):
            width, height = console.size
            seen = asker.seen
            if seen.refused is not None:
                raise seen.refused
            live.update(_drawn(seen, endpoint, width, height), refresh=True)


def print_looks(
    endpoint: str, security: ClientSecurity, *, every_s: float, count: int | None, as_json: bool
) -> None:
    """One below the other; endless without `count`. Raises what keeps the first from being had."""
    console = Console()
    number, printed = 0, 0
    with Asker(endpoint, security, every_s) as asker, contextlib.suppress(KeyboardInterrupt):
        while count is None or printed < count:
            seen = asker.seen
            if seen.number == number:
                time.sleep(min(0.05, every_s))
                continue
            number = seen.number
            if seen.refused is not None:
                raise seen.refused
            if seen.report is None:
                raise DataServiceError(seen.trouble)
            printed += 1
            if as_json:
                sys.stdout.write(f"{orjson.dumps(_told(seen)).decode()}\n")
                sys.stdout.flush()
            else:
                console.print(_drawn(seen, endpoint, console.width, PRINTED_ROWS, keys=False))


def _drawn(
    seen: Seen, endpoint: str, width: int, height: int, *, keys: bool = True
) -> RenderableType:
    return view_of(
        seen.report,
        endpoint=endpoint,
        trouble=seen.trouble,
        silent_s=seen.silent_s,
        width=width,
        height=height,
        keys=keys,
    )


def _told(seen: Seen) -> dict[str, Any]:
    return {
        "heard_s_ago": round(seen.silent_s, 1),
        "trouble": seen.trouble,
        "status": seen.report,
    }


def _slept(seconds: float) -> bool:
    time.sleep(seconds)
    return False


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """A function that waits for so many seconds, and says whether a key that ends was pressed."""
    if not sys.stdin.isatty():
        yield _slept
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def pressed(timeout_s: float) -> bool:
        if not select.select([descriptor], [], [], timeout_s)[0]:
            return False
        keys = os.read(descriptor, 64)
        return not keys or any(key in QUIT for key in keys)

    try:
        tty.setcbreak(descriptor)
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)

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

import orjson
from rich.console import Console, RenderableType
from rich.live import Live

from dataservice.cli.top_view import NO_RATES, Look, Rates, rates_between, view_of
from dataservice.cli.verdict import verdict
from dataservice.errors import DataServiceError
from dataservice.rpc.client import CoordinatorClient
from dataservice.wire.messages import GetStatus, StatusReport

CALL_TIMEOUT_S = 5.0
OVER_S = 4.0
"""Rates are of so long, where the service does not tell them."""
REDRAW_S = 0.2
QUIT = b"qQ\x03\x04"
"""The last two are Ctrl-C and Ctrl-D, where the terminal sends them as keys."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """Up to now."""

    look: Look | None = None
    rates: Rates = NO_RATES
    trouble: str = ""
    number: int = 0
    """Of questions that were answered, one way or the other."""


class Asker:
    """Asks every `every_s` seconds; `seen` may be read from any thread."""

    def __init__(self, endpoint: str, every_s: float) -> None:
        self.seen = Seen()
        self._every_s = every_s
        self._client = CoordinatorClient(endpoint)
        self._stopping = threading.Event()
        self._past: list[Look] = []
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
            look = Look(at=time.monotonic(), report=orjson.loads(answer.status))
            while len(self._past) > 1 and look.at - self._past[1].at >= OVER_S:
                self._past.pop(0)
            rates = rates_between(self._past[0] if self._past else None, look)
        except DataServiceError as error:
            return replace(seen, trouble=str(error))
        except (LookupError, TypeError, ValueError) as error:
            why = f"its answer is of another version ({type(error).__name__}: {error})"
            return replace(seen, trouble=why)
        self._past.append(look)
        return replace(seen, look=look, rates=rates, trouble="")


def watch(endpoint: str, *, every_s: float) -> None:
    """Until q or Ctrl-C; prints one look where standard output is no terminal. Raises ConfigError
    for what is no endpoint."""
    console = Console()
    if not console.is_terminal:
        print_looks(endpoint, every_s=every_s, count=1, as_json=False)
        return
    with (
        Asker(endpoint, every_s) as asker,
        _keys() as pressed,
        Live(console=console, screen=True, auto_refresh=False) as live,
        contextlib.suppress(KeyboardInterrupt),
    ):
        while not pressed(REDRAW_S):
            width, height = console.size
            live.update(_drawn(asker.seen, endpoint, width, height), refresh=True)


def print_looks(endpoint: str, *, every_s: float, count: int | None, as_json: bool) -> None:
    """One below the other; endless without `count`. Raises what keeps the first from being had."""
    console = Console()
    number, printed = 0, 0
    with Asker(endpoint, every_s) as asker, contextlib.suppress(KeyboardInterrupt):
        while count is None or printed < count:
            seen = asker.seen
            if seen.number == number:
                time.sleep(min(0.05, every_s))
                continue
            number = seen.number
            if seen.look is None and seen.trouble:
                raise DataServiceError(seen.trouble)
            if number == 1 and _says_too_little(seen):
                continue
            printed += 1
            if as_json:
                sys.stdout.write(f"{_as_json(seen)}\n")
                sys.stdout.flush()
            else:
                console.print(_drawn(seen, endpoint, console.width, 1000, keys=False))


def _says_too_little(seen: Seen) -> bool:
    """Who waits is known from the second look on, where the service does not say."""
    return seen.look is not None and bool(seen.look.report.get("session")) and not seen.rates.shares


def _drawn(
    seen: Seen, endpoint: str, width: int, height: int, *, keys: bool = True
) -> RenderableType:
    return view_of(
        seen.look,
        seen.rates,
        endpoint=endpoint,
        trouble=seen.trouble,
        silent_s=_silent_s(seen),
        width=width,
        height=height,
        keys=keys,
    )


def _silent_s(seen: Seen) -> float:
    return 0.0 if seen.look is None else time.monotonic() - seen.look.at


def _as_json(seen: Seen) -> str:
    assert seen.look is not None
    found = verdict(seen.look.report, seen.rates.shares)
    told = {
        "verdict": found.words,
        "level": found.level,
        "trouble": seen.trouble,
        "heard_s_ago": round(_silent_s(seen), 1),
        "packs_per_s": seen.rates.packs_per_s,
        "steps_per_s": seen.rates.steps_per_s,
        "waited_share": seen.rates.shares,
        "status": seen.look.report,
    }
    return orjson.dumps(told).decode()


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

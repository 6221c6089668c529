"""One line that says how the running service is, redrawn in a terminal, plain text elsewhere."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.live import Live

PLAIN_EVERY_S = 30.0


class StatusLine:
    def __init__(self, endpoint: str, page_url: str = "") -> None:
        """`page_url`: of the status page; "" without one."""
        self._console = Console()
        self._live = Live("", console=self._console, auto_refresh=False, transient=True)
        self._last_plain = 0.0
        self._last_text = ""
        self._last: tuple[float, int] | None = None
        self._endpoint, self._page_url = endpoint, page_url

    def __enter__(self) -> StatusLine:
        self._console.print(f"serving on {self._endpoint}", highlight=False)
        if self._page_url:
            self._console.print(f"status page: {self._page_url}", highlight=False, soft_wrap=True)
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, status: dict[str, Any]) -> None:
        self.note(self._text(status))

    def note(self, text: str) -> None:
        now = time.monotonic()
        if self._console.is_terminal:
            self._live.update(text, refresh=True)
        elif now - self._last_plain > PLAIN_EVERY_S and text != self._last_text:
            self._last_plain, self._last_text = now, text
            self._console.print(text, highlight=False, soft_wrap=True)

    def _text(self, status: dict[str, Any]) -> str:
        workers = status.get("workers", [])
        served = sum(worker["served_packs"] for worker in workers)
        now = time.monotonic()
        rate = 0.0
        if self._last is not None and served >= self._last[1]:
            rate = (served - self._last[1]) / max(now - self._last[0], 1e-9)
        self._last = (now, served)
        ready = sum(worker["ready_bytes"] for worker in workers)
        session = status.get("session")
        where = "no trainer yet"
        if session is not None:
            waited = max(session["waited_s"], default=0.0)
            where = f"step {session['done_step']}, longest wait {waited:.1f} s in all"
            if session["failure"]:
                where = f"FAILED: {session['failure']}"
        return (
            f"{where} | {rate:.1f} packs/s | {len(workers)}/{status.get('target_workers', 0)} "
            f"workers, {decimal(ready)} ready | {status.get('holes', 0)} holes"
        )

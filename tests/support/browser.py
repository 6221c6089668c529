"""A headless Chromium that stays open, spoken to over its DevTools protocol.

Invariants: it reaches this machine alone, and ends with the block.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import shutil
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
needs_browser = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium here; deploy/install_browser.sh installs it on Debian"
)
START_S = 60.0
ANSWER_S = 30.0


class Page:
    """One tab. Errors of its scripts are in `errors`, requests that it made in `loaded`."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.errors: list[str] = []
        self.loaded: list[str] = []
        self._socket = socket
        self._numbers = itertools.count(1)

    async def call(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(ANSWER_S):
            while True:
                message = await self._socket.receive_json()
                if message.get("id") == number:
                    assert "error" not in message, message
                    return message["result"]
                self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        kind, params = message.get("method"), message.get("params", {})
        if kind == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif kind == "Log.entryAdded" and params["entry"]["source"] in ("security", "javascript"):
            self.errors.append(params["entry"]["text"])
        elif kind == "Network.requestWillBeSent":
            self.loaded.append(params["request"]["url"])

    async def open(self, url: str) -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)

    async def value(self, script: str) -> Any:
        """Of an expression, which may be a promise."""
        done = await self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    async def text(self, selector: str) -> str:
        found: str = await self.value(f"document.querySelector({selector!r})?.innerText ?? ''")
        return found

    async def until(self, condition: str, timeout_s: float = 30.0) -> None:
        """Until an expression is true."""
        end = time.monotonic() + timeout_s
        while not await self.value(condition):
            body = await self.text("body")
            assert time.monotonic() < end, f"{condition} did not come true:\n{body}\n{self.errors}"
            await asyncio.sleep(0.1)

    async def look(self, *, width: int, height: int = 900, dark: bool = False) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    async def picture(self) -> bytes:
        """PNG of the whole page."""
        shot = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(shot["data"])


@asynccontextmanager
async def browser_page(folder: Path) -> AsyncIterator[Page]:
    """An empty tab of a browser whose profile is in `folder`."""
    assert BROWSER is not None
    profile = folder / "profile"
    port_file = profile / "DevToolsActivePort"
    port_file.unlink(missing_ok=True)
    process = subprocess.Popen(
        [
            *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
            *("--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking"),
            *("--disable-component-update", "--disable-sync", "--hide-scrollbars"),
            "--remote-debugging-port=0",
            *("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",),
            *(f"--user-data-dir={profile}", "about:blank"),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        end = time.monotonic() + START_S
        while not port_file.exists() or not (lines := port_file.read_text().split()):
            assert time.monotonic() < end and process.poll() is None, "the browser did not start"
            await asyncio.sleep(0.1)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{lines[0]}/json/list") as answer:
                tabs = [tab for tab in await answer.json() if tab["type"] == "page"]
            url = tabs[0]["webSocketDebuggerUrl"]
            async with session.ws_connect(url, max_msg_size=64 << 20) as socket:
                yield Page(socket)
    finally:
        process.terminate()
        process.wait(20)

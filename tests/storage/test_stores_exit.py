"""A process ends although calls to its stores never come back, whether it closes them or not."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
from support.web_server import web_server

READ = """
import sys, time
from dataservice.errors import StorageTimeout
from dataservice.storage.objects import Store

store = Store()
for _ in range(2):
    try:
        store.read({url!r}, 0, 4, deadline_s=0.3)
    except StorageTimeout as error:
        assert "no answer within" in str(error)
    else:
        raise AssertionError("the read came back")
assert store.stuck_reads == 2
if {close}:
    store.close()
print("end of the script")
"""
SILENT_LOOKUP = """
import socket, time

socket.getaddrinfo = lambda *args, **options: time.sleep(600)
"""
WEDGED_STORES = """
import asyncio, time
import fsspec
from fsspec.asyn import AsyncFileSystem

class Wedged(fsspec.AbstractFileSystem):
    protocol = "wedged"

    def info(self, path, **options):
        time.sleep(600)

class AsyncWedged(AsyncFileSystem):
    protocol = "asyncwedged"

    async def _info(self, path, **options):
        await asyncio.sleep(600)

fsspec.register_implementation("wedged", Wedged)
fsspec.register_implementation("asyncwedged", AsyncWedged)
"""


def ends(script: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end of the script\n", "")


@pytest.mark.parametrize("close", [True, False])
def test_a_web_server_that_does_not_answer(close: bool) -> None:
    with web_server() as server:
        server.files["/a"] = b"data"
        server.hang = threading.Event()
        ends(READ.format(url=server.url + "/a", close=close))
        server.hang.set()


def test_a_host_name_whose_lookup_hangs() -> None:
    ends(SILENT_LOOKUP + READ.format(url="http://no-such-host.invalid/a", close=True))


@pytest.mark.parametrize("protocol", ["wedged", "asyncwedged"])
@pytest.mark.parametrize("close", [True, False])
def test_another_store_of_fsspec_that_hangs(protocol: str, close: bool) -> None:
    ends(WEDGED_STORES + READ.format(url=f"{protocol}://a/b", close=close))

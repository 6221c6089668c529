"""Lines of JSON, and what they say of who wrote them and about what."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from io import StringIO

import pytest

from dataservice.errors import ConfigError
from dataservice.obs.logs import FORMAT_VARIABLE, JsonFormatter, Logs, bound

LOG = logging.getLogger("dataservice.test")


@pytest.fixture
def lines() -> Iterator[StringIO]:
    written = StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(JsonFormatter({"job": "vlm", "role": "worker"}))
    LOG.addHandler(handler)
    yield written
    LOG.removeHandler(handler)


def read(written: StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in written.getvalue().splitlines()]


def test_a_line_says_who_and_what(lines: StringIO) -> None:
    with bound(step=7, dp_rank=3):
        LOG.warning("pack %s\nis late", "p1")
    LOG.warning("outside")
    first, second = read(lines)
    assert first.pop("time").endswith("+00:00")  # type: ignore[attr-defined]
    assert first.pop("pid")
    assert first == {
        "level": "WARNING",
        "logger": "dataservice.test",
        "message": "pack p1\nis late",
        "job": "vlm",
        "role": "worker",
        "step": 7,
        "dp_rank": 3,
    }
    assert "step" not in second


def test_an_exception_is_a_field(lines: StringIO) -> None:
    try:
        raise ValueError("no")
    except ValueError:
        LOG.exception("it ended")
    (line,) = read(lines)
    assert str(line["exception"]).endswith("ValueError: no")


def test_threads_and_tasks_do_not_share_what_they_are_about(lines: StringIO) -> None:
    both = threading.Barrier(2)

    def in_thread(step: int) -> None:
        with bound(step=step):
            both.wait(5)
            LOG.warning("thread")

    async def in_task(step: int) -> None:
        with bound(step=step), bound(dp_rank=step + 1):
            await asyncio.sleep(0)
            LOG.warning("task")

    async def tasks() -> None:
        await asyncio.gather(in_task(3), in_task(4))

    threads = [threading.Thread(target=in_thread, args=(step,)) for step in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    asyncio.run(tasks())
    found = [(line["message"], line["step"], line.get("dp_rank")) for line in read(lines)]
    assert sorted(found[:2]) == [("thread", 1, None), ("thread", 2, None)]
    assert sorted(found[2:]) == [("task", 3, 4), ("task", 4, 5)]


def test_another_format_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FORMAT_VARIABLE, "xml")
    with pytest.raises(ConfigError, match=f'{FORMAT_VARIABLE} is "xml", must be text or json'):
        Logs.from_environment()
    monkeypatch.setenv(FORMAT_VARIABLE, "")
    assert Logs.from_environment(job="j") == Logs(format="text", job="j")


PROCESS = """
import logging, subprocess, sys
from dataservice.obs.logs import Logs
Logs(format=sys.argv[1], job="vlm").install("INFO", role="coordinator")
logging.getLogger("dataservice.x").info("one")
logging.getLogger("other").info("not shown")
logging.getLogger("other").warning("two")
child = (
    "import logging; from dataservice.obs.logs import Logs; "
    "Logs.from_environment().install(role='planner'); "
    "logging.getLogger('dataservice').error('three')"
)
subprocess.run([sys.executable, "-c", child], check=True)
"""


def test_a_process_and_what_it_starts() -> None:
    def logged(how: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", PROCESS, how], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stderr.splitlines()

    lines = [json.loads(line) for line in logged("json")]
    assert [(line["message"], line["role"], line["job"]) for line in lines] == [
        ("one", "coordinator", "vlm"),
        ("two", "coordinator", "vlm"),
        ("three", "planner", "vlm"),
    ]
    text = logged("text")
    assert [line.rpartition(": ")[2] for line in text] == ["one", "two", "three"]
    assert text[0].endswith(" INFO dataservice.x: one")

"""A process that has used a client and forks, as a DataLoader with workers does: an error that says
what to do, at once, in a child that then ends as any other; and the parent goes on."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from support.proof import nothing_leaks

from trainer_client.testing import FakeService, synthetic_packs

PACKS = synthetic_packs(12, seed=4)
DEADLINE_S = 60.0
CRASHES = 3

COMMON = """
import os, sys, time, traceback, warnings
warnings.simplefilter("ignore")
import torch
from torch.utils.data import DataLoader
from dataservice.errors import DataServiceError
from trainer_client import PackStream, ParallelLayout

def stream_of():
    layout = ParallelLayout.data_parallel(0, 1)
    return PackStream(sys.argv[1], job="test", layout=layout, micro_steps=2, timeout_s=20)
"""

FORK = """
stream = stream_of()
first = next(stream)
child = os.fork()
if child == 0:
    errors = []
    for use in (lambda: next(stream), lambda: stream.get(0, 0), stream.open):
        try:
            use()
        except DataServiceError as error:
            errors.append(str(error))
    print("\\n".join(errors), flush=True)
    stream.close()
    sys.exit(len(errors))  # through the interpreter's end, with all that is registered for it
_, status = os.waitpid(child, 0)
rest = list(stream)
stream.close()
print("parent", 1 + len(rest), os.waitstatus_to_exitcode(status))
"""

LOADER_AFTER_USE = """
stream = stream_of()
next(stream)
try:
    list(DataLoader(stream, batch_size=None, num_workers=2, multiprocessing_context="fork"))
except Exception as error:
    print(type(error).__name__, error)
print("parent", 1 + len(list(stream)))
stream.close()
"""

LOADER_AFTER_ANOTHER = """
with stream_of() as used:
    next(used)
    fresh = stream_of()
    try:
        list(DataLoader(fresh, batch_size=None, num_workers=1, multiprocessing_context="fork"))
    except Exception as error:
        print(type(error).__name__, error)
    print("parent", 1 + len(list(used)))
"""


@pytest.fixture
def service() -> Iterator[FakeService]:
    with FakeService(PACKS, num_workers=2) as service:
        yield service


def run(script: str, service: FakeService) -> str:
    started = time.monotonic()
    with nothing_leaks():
        done = subprocess.run(
            [sys.executable, "-c", COMMON + script, service.endpoint],
            timeout=DEADLINE_S,
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    print(f"told after {time.monotonic() - started:.1f} s")
    return done.stdout


def test_a_forked_child_is_told_and_ends(service: FakeService) -> None:
    said = run(FORK, service)
    assert said.count("after a fork; open one stream in the process that trains") == 3
    assert "num_workers=0" in said
    assert said.splitlines()[-1] == "parent 12 3"
    assert service.closed == {0}


def test_workers_of_a_data_loader_are_told(service: FakeService) -> None:
    said = run(LOADER_AFTER_USE, service)
    assert "DataServiceError" in said and "num_workers=0" in said
    assert said.splitlines()[-1] == "parent 12"


def test_workers_of_a_data_loader_with_a_fresh_stream_are_told(service: FakeService) -> None:
    """Now and then gRPC, which is in use at the fork, crashes the child first (grpc#32992)."""
    for _ in range(CRASHES):
        said = run(LOADER_AFTER_ANOTHER, service)
        assert said.splitlines()[-1] == "parent 12"
        if "DataLoader worker" not in said:
            break
    assert "ConfigError" in said and "num_workers=0" in said

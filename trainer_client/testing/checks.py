"""What tests ask of streams: the same batches, also after a resume, and all ranks read at once.

Invariants: a check fails by an AssertionError that says where; no thread outlives a call that
returns.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence

import torch

from trainer_client.batch import MicroBatch
from trainer_client.stream import PackStream

_NO_WAIT = {"waited_s": 0.0, "step_waited_s": 0.0}


def assert_same_batches(got: Sequence[MicroBatch], expected: Sequence[MicroBatch]) -> None:
    """Same addresses, same packs, same tensors; only the seconds waited may differ."""
    assert len(got) == len(expected), f"{len(got)} batches, expected {len(expected)}"
    for a, b in zip(got, expected, strict=True):
        where = f"step {b.step} micro-step {b.micro_step}"
        assert a.meta | _NO_WAIT == b.meta | _NO_WAIT, where
        assert a.is_last_micro_step == b.is_last_micro_step, where
        assert a.keys() == b.keys(), where
        for name, value in b.items():
            same = torch.equal(a[name], value) if torch.is_tensor(value) else a[name] == value
            assert same, f"{where}: {name} differs"


def assert_resume_identical(
    make_stream: Callable[[], PackStream], cut: int, expected: Sequence[MicroBatch] | None = None
) -> None:
    """A stream stopped after `cut` batches and continued from its state gives what one run gives.

    `make_stream` makes a new stream of a job with one rank; `expected` saves reading it whole.
    """
    if expected is None:
        with make_stream() as stream:
            expected = list(stream)
    with make_stream() as stream:
        before = [batch for _, batch in zip(range(cut), stream, strict=False)]
        state = json.loads(json.dumps(stream.state_dict()))
    with make_stream() as stream:
        stream.load_state_dict(state)
        assert stream.state_dict() == state
        rest = list(stream)
        assert stream.state_dict() == state or rest
    assert_same_batches(before + rest, expected)


def read_all(streams: Sequence[PackStream], timeout_s: float = 60.0) -> list[list[MicroBatch]]:
    """Every stream to its end, each in a thread, as the ranks of a job; batches by stream."""
    results: list[list[MicroBatch]] = [[] for _ in streams]
    errors: list[BaseException] = []

    def read(stream: Iterator[MicroBatch], into: list[MicroBatch]) -> None:
        try:
            into.extend(stream)
        except BaseException as error:  # raised again by the caller's thread
            errors.append(error)

    threads = [
        threading.Thread(target=read, args=(iter(stream), into))
        for stream, into in zip(streams, results, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
        assert not thread.is_alive(), f"a stream did not end within {timeout_s} s"
    if errors:
        raise errors[0]
    return results

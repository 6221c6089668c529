"""The decoder process: `python -m dataservice.pipeline.isolation.child SOCKET`.

Invariants: it decodes one picture at a time and holds nothing between two; it ends when its worker
does (its socket closes) and, stuck in a picture, soon after the deadline by an alarm that no code
of a decoder can hold up; its memory is bounded; it writes no core file and has no input.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import sys

import numpy as np

from dataservice.errors import ImageError
from dataservice.pipeline.images import Decoder, ImageDecoder, decoder_fingerprint
from dataservice.pipeline.isolation.frames import MAX_REASON, Done, Ready, Setup, Task, Wire
from dataservice.pipeline.specs import num_patches

ALARM_AFTER_S = 2.0
"""Past the deadline, at which the worker ends this process if it still runs."""


def serve(wire: Wire) -> None:
    setup = wire.receive(Setup)
    decoder = ImageDecoder(setup.rules, setup.limits)
    decoder_fingerprint()  # decodes a little of everything: nothing is loaded later
    _bound_memory(setup.memory_bytes)
    wire.send(Ready())
    while True:
        task = wire.receive(Task)
        signal.setitimer(signal.ITIMER_REAL, setup.limits.deadline_s + ALARM_AFTER_S)
        data = bytearray(task.data_bytes)
        wire.receive_into(data)
        patches = np.empty(setup.rules.pixel_shape(num_patches(task.image, setup.rules)), np.uint8)
        done = _decoded(decoder, bytes(data), task, patches)
        wire.send(done)
        if not done.reason:
            wire.send_bytes(patches.reshape(-1).data)
        signal.setitimer(signal.ITIMER_REAL, 0)


def _decoded(decoder: Decoder, data: bytes, task: Task, patches: np.ndarray) -> Done:
    try:
        decoder.prepare(data, task.image)(patches)
    except ImageError as error:
        return Done(reason=error.reason[:MAX_REASON] or "it cannot be decoded")
    except MemoryError:
        return Done(reason="out of memory", out_of_memory=True)
    return Done()


def _bound_memory(more_bytes: int) -> None:
    """`more_bytes` on top of the address space in use; the first process the kernel ends when the
    machine has no memory left."""
    with open("/proc/self/statm", encoding="ascii") as file:
        used_bytes = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = used_bytes + more_bytes
    if hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as f:
        f.write("1000")


def main() -> int:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    wire = Wire(socket.socket(fileno=int(sys.argv[1])))
    os.set_inheritable(int(sys.argv[1]), False)
    try:
        serve(wire)
    except (EOFError, ConnectionError, BrokenPipeError):
        return 0  # the worker has closed it
    return 1


if __name__ == "__main__":
    sys.exit(main())

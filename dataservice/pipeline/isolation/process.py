"""A decoder process as its worker sees it: one picture at a time, under a deadline.

Invariants: whoever makes one closes it, which ends the process at once whatever it does; how it
ended is said in words; nothing that it sends is trusted beyond the size that was asked for.
"""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import sys
import time

import msgspec
import numpy as np
from numpy.typing import NDArray

from dataservice.core.packspec import ImageSpec
from dataservice.errors import DataServiceError, ImageError
from dataservice.pipeline.isolation.frames import Done, Ready, Setup, Task, Wire
from dataservice.pipeline.specs import num_patches

_LOG = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "dataservice.pipeline.isolation.child")
"""Followed by the number of its socket."""
START_S = 60.0
"""It may take so long until it is ready: it loads every decoder."""
END_S = 5.0
"""A process that was killed is waited for so long."""
_NOT_STARTED = "the process that decodes suspect pictures did not start"


class Died(Exception):
    """The process ended by itself, or said what makes no sense."""


class OutOfMemory(Exception):
    """The picture needs more memory than one may take."""


class DecoderProcess:
    """Not thread-safe, but for `close`."""

    def __init__(self, setup: Setup) -> None:
        """Raises DataServiceError when it does not start."""
        self._setup = setup
        self.idle_since = time.monotonic()
        mine, its = socket.socketpair()
        self._wire = Wire(mine)
        try:
            with its:
                self._process = subprocess.Popen(
                    [*COMMAND, str(its.fileno())],
                    pass_fds=(its.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                )
        except OSError as error:
            mine.close()
            raise DataServiceError(f"{_NOT_STARTED}: {error}") from error
        try:
            until = time.monotonic() + START_S
            self._wire.send(setup, until)
            self._wire.receive(Ready, until)
        except TimeoutError as error:
            self.close()
            raise DataServiceError(f"{_NOT_STARTED} within {START_S:g} s") from error
        except (OSError, EOFError, ValueError, msgspec.MsgspecError) as error:
            why = self._ended()
            self.close()
            raise DataServiceError(f"{_NOT_STARTED}: {why}") from error

    @property
    def pid(self) -> int:
        return self._process.pid

    def decode(self, data: bytes, image: ImageSpec) -> NDArray[np.uint8]:
        """Rows of `pixel_values`, uint8 of shape `rules.pixel_shape`.

        Raises ImageError for what the decoder refuses. After anything else it is of no more use:
        OutOfMemory, Died when it ended, TimeoutError past the picture's deadline.
        """
        limits, rules = self._setup.limits, self._setup.rules
        until = time.monotonic() + limits.deadline_s
        patches = np.empty(rules.pixel_shape(num_patches(image, rules)), np.uint8)
        try:
            self._wire.send(Task(image=image, data_bytes=len(data)), until)
            self._wire.send_bytes(data, until)
            done = self._wire.receive(Done, until)
            if not done.reason:
                self._wire.receive_into(patches.reshape(-1).data, until)
        except TimeoutError:
            raise
        except (OSError, EOFError) as error:
            raise Died(self._ended()) from error
        except (ValueError, msgspec.MsgspecError) as error:
            raise Died("its answer made no sense") from error
        if done.out_of_memory:
            raise OutOfMemory
        self.idle_since = time.monotonic()
        if done.reason:
            raise ImageError(done.reason)
        return patches

    def _ended(self) -> str:
        """How, such as "SIGABRT" or "exit code 1"."""
        try:
            code = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            return "it closed its socket"
        if code >= 0:
            return f"exit code {code}"
        try:
            return signal.Signals(-code).name
        except ValueError:
            return f"signal {-code}"

    def close(self) -> None:
        """From any thread, any number of times."""
        self._process.kill()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            _LOG.warning("decoder process %d does not end; its alarm is what is left", self.pid)
        self._wire.close()

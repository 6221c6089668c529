"""Runs an action again and again, killed with SIGKILL at one system call further each time.

A kill point is a call that changes a disk: fsync, rename, replace, unlink, ftruncate, pwrite and
write (these two also after half of their bytes). Each run is a fork of this process, which has no
gRPC threads where it was started by `support.alone`.
"""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable
from typing import Any

_WHOLE = ("fsync", "rename", "replace", "unlink", "ftruncate", "posix_fallocate")
_PARTLY = ("pwrite", "write")


class _Points:
    def __init__(self, kill_at: int) -> None:
        self._kill_at = kill_at
        self._passed = 0

    def here(self) -> None:
        if self._passed == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self._passed += 1

    def install(self) -> None:
        for name in _WHOLE:
            setattr(os, name, self._whole(getattr(os, name)))
        for name in _PARTLY:
            setattr(os, name, self._partly(getattr(os, name)))

    def _whole(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.here()
            return call(*args, **kwargs)

        return counted

    def _partly(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(fd: int, data: Any, *args: Any) -> Any:
            self.here()
            view = memoryview(data).cast("B")
            if self._passed == self._kill_at and len(view) > 1:
                call(fd, view[: len(view) // 2], *args)
            self.here()
            return call(fd, data, *args)

        return counted


def killed_at(point: int, action: Callable[[], object]) -> bool:
    """Run `action` in a fork that dies at the given kill point; False when it ended before."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            _Points(point).install()
            action()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return True
    assert os.waitstatus_to_exitcode(status) == 0, "the action failed, its traceback is above"
    return False

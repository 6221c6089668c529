"""Whose a state folder is: one coordinator's at a time, each with a higher epoch than the last.

A lock on `coordinator.lock` tells at once where locks reach: on one machine always, over NFS
usually. `coordinator.owner` tells everywhere: its first line says who took the folder, its second
is renewed all the time; whoever comes from another machine takes the folder from an owner that was
silent for WATCH_LEASES of its leases, by putting a file of its own in place.

Invariants: `check` reads the file anew, so an owner that checks after a write is on disk, and
answers only then, has answered for nothing that its successor, who reads after taking, cannot see;
an owner renewed within its lease need not check. A file of another owner is never written to.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from dataservice.errors import JobHeld, StorageError
from dataservice.storage.tables import sync_folder

LOCK = "coordinator.lock"
OWNER = "coordinator.owner"
WATCH_LEASES = 2.5
RENEWALS_A_LEASE = 3
_POLLS_A_LEASE = 5
_SIZE = 2048
"""Bytes of the owner's file, always: it is written by one call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    epoch: int
    nonce: str
    job: str
    machine: str
    """Of this boot; locks are seen by all who have the same one."""
    host: str
    pid: int
    lease_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Sign:
    """Of life."""

    beat: int = 0
    endpoint: str = ""
    released: bool = False


class Ownership:
    """Made by `take`. Safe across threads, for `renew` may wait for a slow disk."""

    def __init__(self, folder: Path, owner: Owner, lock: int, file: int) -> None:
        self.owner = owner
        self.endpoint = ""
        """Where it serves, for those who are refused; goes out with the next renewal."""
        self._path = folder / OWNER
        self._lock = lock
        self._file = file
        self._beat = 0
        self._renewed = time.monotonic()
        self._writing = threading.Lock()

    @property
    def epoch(self) -> int:
        return self.owner.epoch

    def renew(self) -> None:
        """A sign of life; raises JobHeld if somebody else has taken the folder, and OSError."""
        began = time.monotonic()
        with self._writing:
            if self._file < 0:
                return
            self._write(released=False)
            os.fsync(self._file)
        self.check()
        self._renewed = began

    def _write(self, *, released: bool) -> None:
        self._beat += 1
        sign = Sign(beat=self._beat, endpoint=self.endpoint, released=released)
        os.pwrite(self._file, _encoded(self.owner, sign), 0)

    def check(self) -> None:
        """Raises JobHeld if somebody else has taken the folder, StorageError if it cannot tell."""
        try:
            found = _read(self._path)
        except OSError as error:
            raise StorageError(
                f"cannot tell whether {self._path} is still ours: {error}"
            ) from error
        if found is None or found[0] != self.owner:
            by = f"nobody: {self._path} is gone" if found is None else _in_words(*found)
            raise JobHeld(
                f"this coordinator (epoch {self.epoch}, process {self.owner.pid} on "
                f"{self.owner.host}) no longer owns {self._path.parent}, and hands out nothing "
                f"more; it is now held by {by}"
            )

    def check_if_old(self) -> None:
        """Cheap: as `check`, if the last sign of life is so old that there may be another."""
        if time.monotonic() - self._renewed > self.owner.lease_s:
            self.check()

    def release(self) -> None:
        """Whoever comes next need not wait; idempotent."""
        with self._writing:
            if self._file < 0:
                return
            try:
                self._write(released=True)
            finally:
                os.close(self._file)
                os.close(self._lock)
                self._file = -1


def take(folder: Path, *, job: str, lease_s: float) -> Ownership:
    """Takes the folder, at once where its last owner has ended for certain, otherwise after it was
    silent for WATCH_LEASES of its leases. Raises JobHeld, which names the owner."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        locked = _locked(lock)
        found = _read(folder / OWNER)
        if locked is False:
            raise _held(folder, found)
        if found is not None and not (locked and found[0].machine == machine()):
            _watch(folder, *found)
        owner = Owner(
            epoch=1 if found is None else found[0].epoch + 1,
            nonce=secrets.token_hex(8),
            job=job,
            machine=machine(),
            host=socket.gethostname(),
            pid=os.getpid(),
            lease_s=lease_s,
        )
        file = _put(folder, owner)
    except BaseException:
        os.close(lock)
        raise
    return Ownership(folder, owner, lock, file)


def machine() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _locked(descriptor: int) -> bool | None:
    """None where the file system has no locks: the owner's signs of life decide alone."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _watch(folder: Path, owner: Owner, sign: Sign) -> None:
    """Returns when the owner has released the folder, or was silent for long enough."""
    until = time.monotonic() + WATCH_LEASES * owner.lease_s
    while not sign.released and time.monotonic() < until:
        time.sleep(owner.lease_s / _POLLS_A_LEASE)
        found = _read(folder / OWNER)
        if found is None or found[0] != owner:
            raise _held(folder, found)
        if found[1] != sign and not found[1].released:
            raise _held(folder, found)
        sign = found[1]


def _put(folder: Path, owner: Owner) -> int:
    """The owner's file in its place; returns its descriptor."""
    fresh = folder / f"{OWNER}.{owner.nonce}"
    file = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(file, _encoded(owner, Sign()), 0)
        os.fsync(file)
        os.rename(fresh, folder / OWNER)
        sync_folder(str(folder))
    except BaseException:
        os.close(file)
        fresh.unlink(missing_ok=True)
        raise
    return file


def _encoded(owner: Owner, sign: Sign) -> bytes:
    lines = [json.dumps(asdict(part)) for part in (owner, sign)]
    data = "\n".join(lines).encode()
    if len(data) > _SIZE:
        raise ValueError(f"an owner of {len(data)} bytes, over {_SIZE}")
    return data.ljust(_SIZE)


def _read(path: Path) -> tuple[Owner, Sign] | None:
    """By opening it, which on NFS asks the server; None where there is none, or it is damaged."""
    try:
        lines = path.read_bytes().splitlines()
        owner = Owner(**json.loads(lines[0]))
    except (FileNotFoundError, ValueError, IndexError, TypeError):
        return None
    try:
        return owner, Sign(**json.loads(lines[1]))
    except (ValueError, IndexError, TypeError):
        return owner, Sign(beat=-1)  # read while it was written


def _held(folder: Path, found: tuple[Owner, Sign] | None) -> JobHeld:
    by = "another coordinator, which is just starting" if found is None else _in_words(*found)
    return JobHeld(
        f"state_dir {folder} is held by {by}; stop that one first, or give this service a "
        "state_dir of its own"
    )


def _in_words(owner: Owner, sign: Sign) -> str:
    where = f", serving at {sign.endpoint}" if sign.endpoint else ""
    return (
        f"the coordinator of job {owner.job} with epoch {owner.epoch}, process {owner.pid} on "
        f"{owner.host}{where}"
    )

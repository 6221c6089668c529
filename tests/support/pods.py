"""Pods of Kubernetes as far as Linux gives them: each a network, process and host name namespace
of its own on one bridge, with a read-only root, as a user without rights.

Invariants: bridge, namespaces and processes are gone at the end of the block, by their own names;
mounts are the pods' own and touch nothing of the machine's.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil

_NUMBERS = itertools.count()
COMMAND_S = 20.0
UID = 10001
_WITHOUT_RIGHTS = [
    "setpriv",
    f"--reuid={UID}",
    f"--regid={UID}",
    "--clear-groups",
    "--no-new-privs",
    "--bounding-set=-all",
    "--inh-caps=-all",
]

# Python and this project are shown in place, also where they are below /root or /tmp.
_ENTER = r"""
set -eu
mount --make-rprivate /
mount -t tmpfs tmpfs /mnt
number=0
IFS=:
for path in $SHOWN; do
  number=$((number + 1))
  mkdir "/mnt/$number"
  mount --bind "$path" "/mnt/$number"
done
mkdir -m 777 /mnt/writable
mount --bind "$WRITABLE" /mnt/writable
printf '%s\n' "127.0.0.1 localhost" "$HOSTS" >/mnt/hosts
mount --bind /mnt/hosts /etc/hosts
mount -o remount,ro,bind /
mount -t tmpfs -o mode=1777 tmpfs /tmp
mount -t tmpfs -o mode=755 tmpfs /root
number=0
for path in $SHOWN; do
  number=$((number + 1))
  case "$path" in /tmp/* | /root/*)
    mkdir -p "$path"
    mount --bind "/mnt/$number" "$path"
    ;;
  esac
done
mount -t tmpfs -o mode=1777,size=1g tmpfs /dev/shm
mount -t proc proc /proc
hostname "$POD"
exec "$@"
"""
LOOPBACK = "00000000000000000000000001000000"
"""As /proc/net/tcp6 has ::1."""
WRITABLE = "/mnt/writable"
"""Where a pod sees its volume; besides it only /tmp and /dev/shm can be written to."""


def lacks() -> str:
    """Why there are no such pods here; "" where there are."""
    for program in ("ip", "unshare", "nsenter", "setpriv"):
        if shutil.which(program) is None:
            return f"the program `{program}` is not installed"
    try:
        with Pods() as pods:
            pod = pods.start("probe", ["true"], volume=Path("/tmp"))
            return "" if pod.wait(COMMAND_S) == 0 else f"no namespaces: {pod.output()}"
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        return f"namespaces are not permitted: {detail}"


class Pod:
    def __init__(
        self, name: str, address: str, netns: str, folder: Path, shown: tuple[str, ...]
    ) -> None:
        self.name, self.address = name, address
        self._shown = shown
        self._netns = netns
        self._log = folder / f"{name}.log"
        self._environment: list[str] = []
        self.process: subprocess.Popen[bytes] | None = None

    def run(
        self, command: list[str], environment: Mapping[str, str], volume: Path, hosts: str
    ) -> None:
        project = str(Path(__file__).resolve().parents[2])
        shown = [sys.base_prefix, sys.prefix, project, *self._shown]
        outside = {
            "PATH": os.environ["PATH"],
            "SHOWN": ":".join(shown),
            "WRITABLE": str(volume),
            "HOSTS": hosts,
            "POD": self.name,
        }
        self._environment = ["env", "-i", *(f"{k}={v}" for k, v in environment.items())]
        inside = [*_WITHOUT_RIGHTS, *self._environment, *command]
        enter = ["bash", "-c", _ENTER, "enter", *inside]
        own = ["unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child"]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                ["ip", "netns", "exec", self._netns, *own, *enter],
                env=outside,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def has_ended(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def processes(self) -> list[psutil.Process]:
        """Those in it, its first one foremost."""
        assert self.process is not None
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def execute(self, command: list[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Beside its first process, as `kubectl exec` and hooks do."""
        first = str(self.processes()[0].pid)
        enter = ["nsenter", "--target", first, "--mount", "--uts", "--ipc", "--net", "--pid"]
        return subprocess.run(
            [*enter, *_WITHOUT_RIGHTS, *self._environment, *command],
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def terminate(self) -> None:
        """SIGTERM to its first process, as the kubelet sends it."""
        self.processes()[0].send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float) -> int:
        assert self.process is not None
        return self.process.wait(timeout_s)

    def listening(self) -> dict[int, set[int]]:
        """Port -> ids of the processes that listen there for others than the pod itself."""
        members = self.processes()
        ports = {} if not members else _listening_sockets(members[0].pid)
        found: dict[int, set[int]] = {}
        for process in members:
            with suppress(OSError):
                for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
                    with suppress(OSError):
                        port = ports.get(os.readlink(descriptor))
                        if port is not None:
                            found.setdefault(port, set()).add(process.pid)
        return found


def _listening_sockets(pid: int) -> dict[str, int]:
    """Of a process's network namespace: what a descriptor says -> port, but for loopback's."""
    found: dict[str, int] = {}
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            address, _, port = local.rpartition(":")
            is_loopback = address == LOOPBACK or address.endswith("0100007F")
            if state == "0A" and not is_loopback:
                found[f"socket:[{rest[5]}]"] = int(port, 16)
    return found


class Pods:
    """`shown`: folders that the pods see besides Python's, theirs and this project's."""

    def __init__(self, *shown: Path) -> None:
        self._shown = tuple(map(str, shown))
        number = next(_NUMBERS)
        self._bridge = f"pb{os.getpid()}n{number}"
        self._prefix = f"pods-{os.getpid()}-{number}"
        self._net = f"10.{100 + number % 50}.{os.getpid() % 250}"
        self._stack = ExitStack()
        self._pods: list[Pod] = []

    def __enter__(self) -> Pods:
        try:
            _ip("link", "add", self._bridge, "type", "bridge")
            self._stack.callback(_quietly, "link", "del", self._bridge)
            _ip("address", "add", f"{self._net}.1/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for pod in self._pods:
            if pod.process is not None:
                pod.process.kill()  # --kill-child: what is in it goes as well
                pod.process.wait(COMMAND_S)
        self._stack.close()

    def start(
        self,
        name: str,
        command: list[str],
        environment: Mapping[str, str] | None = None,
        *,
        volume: Path,
    ) -> Pod:
        """It knows itself and those started before it by name."""
        number = len(self._pods) + 2
        netns = f"{self._prefix}-{number}"
        here, there = f"{self._bridge}h{number}", "eth0"
        _ip("netns", "add", netns)
        self._stack.callback(_quietly, "netns", "del", netns)
        _ip("link", "add", here, "type", "veth", "peer", "name", there, "netns", netns)
        _ip("link", "set", here, "master", self._bridge, "up")
        inside = ("-n", netns)
        pod = Pod(name, f"{self._net}.{number}", netns, volume.parent, self._shown)
        _ip(*inside, "address", "add", f"{pod.address}/24", "dev", there)
        _ip(*inside, "link", "set", there, "up")
        _ip(*inside, "link", "set", "lo", "up")
        _ip(*inside, "route", "add", "default", "via", f"{self._net}.1")
        self._pods.append(pod)
        hosts = "\n".join(f"{each.address} {each.name}" for each in self._pods)
        pod.run(command, environment or {}, volume, hosts)
        return pod


def ray_start(parameters: Mapping[str, str], *, address: str | None) -> str:
    """The command line that KubeRay makes of a group's rayStartParams; None for the head."""
    given = {"metrics-export-port": "8080", **parameters, "block": "true"} | (
        {} if address is None else {"address": address}
    )
    options = " ".join(
        f"--{name}" if value == "true" else f"--{name}={value}" for name, value in given.items()
    )
    return f"ray start {'--head ' if address is None else ''}{options}"


def wait_until(look: Callable[[], object], what: str, timeout_s: float, *pods: Pod) -> None:
    end = time.monotonic() + timeout_s
    while not look():
        is_over = any(pod.has_ended() for pod in pods)
        if time.monotonic() > end or is_over:
            said = "\n".join(f"--- {pod.name}:\n{pod.output()[-4000:]}" for pod in pods)
            why = "a pod ended" if is_over else f"within {timeout_s:g} s"
            raise AssertionError(f"no {what}: {why}\n{said}")
        time.sleep(0.2)


def _ip(*arguments: str) -> None:
    subprocess.run(
        ["ip", *arguments], check=True, capture_output=True, text=True, timeout=COMMAND_S
    )


def _quietly(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], capture_output=True, timeout=COMMAND_S, check=False)


def shell(text: str) -> list[str]:
    """As KubeRay starts a container."""
    return ["bash", "-c", "--", f"ulimit -n 65536; {text}"]

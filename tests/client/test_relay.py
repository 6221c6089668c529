"""Packs handed on between the processes of a host: bounds, deadlines, ends."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dataservice.rpc import local
from dataservice.rpc.local import roomy
from dataservice.rpc.local_client import Pack
from dataservice.wire.encoded import EncodedPack
from dataservice.wire.messages import OpenSession, SessionOpened, StreamPack
from trainer_client import relay
from trainer_client.relay import Follower, Leader, relay_name, relay_of
from trainer_client.shelf import Shelf

MIB = 1 << 20


def pack_of(value: int, size_bytes: int = MIB) -> Pack:
    return {"pixels": np.full(size_bytes, value, np.uint8)}, {"pack_id": f"p{value}"}


def encoded(value: int, size_bytes: int = MIB) -> EncodedPack:
    arrays, meta = pack_of(value, size_bytes)
    return EncodedPack(arrays, meta, compress=False)


def request(value: int, *, peer: int = 1, wait_s: float = 20.0) -> StreamPack:
    return StreamPack(session=1, pack_id=f"p{value}", dp_rank=0, peer=peer, wait_s=wait_s)


def value_of(pack: Pack | None) -> int:
    assert pack is not None
    values = set(pack[0]["pixels"][:: 1 << 16].tolist())
    assert len(values) == 1 and pack[1] == {"pack_id": f"p{min(values)}"}
    return int(values.pop())


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


@pytest.fixture
def name(tmp_path: Any) -> str:
    return relay_name(f"run {tmp_path}", 0, 0)


@pytest.fixture
def leader(name: str) -> Iterator[Leader]:
    leader = Leader(name, followers=2, max_bytes=4 * roomy(MIB))
    yield leader
    leader.close()


@pytest.fixture
def follower(name: str) -> Iterator[Follower]:
    follower = Follower(name)
    yield follower
    follower.close()


# ---- the shelf ----------------------------------------------------------------------------------


def test_a_pack_stays_until_all_have_taken_it() -> None:
    shelf = Shelf(readers=2, max_bytes=10 * MIB)
    shelf.put("p1", encoded(1))
    for _ in range(2):  # one that asks again is still one
        first = shelf.take("p1", 1)
        assert first is not None
        shelf.let_go(first)
    assert not shelf.is_gone("p1") and shelf.num_packs == 1
    second = shelf.take("p1", 2)
    assert second is first
    assert shelf.is_gone("p1") and shelf.take("p1", 2) is None and not shelf.is_gone("p2")
    shelf.close()
    shelf.close()
    assert shelf.size_bytes == 0


def test_segments_are_used_again_but_never_while_they_are_read() -> None:
    shelf = Shelf(readers=1, max_bytes=10 * MIB)
    segments = set()
    for value in range(20):
        shelf.put(f"p{value}", encoded(value))
        taken = shelf.take(f"p{value}", 1)
        assert taken is not None
        segments.add(taken.segment.fd)
        shelf.let_go(taken)
    assert len(segments) == 1 and shelf.size_bytes == roomy(MIB)
    shelf.put("a", encoded(1))
    read = shelf.take("a", 1)
    assert read is not None
    shelf.put("b", encoded(2))
    other = shelf.take("b", 1)
    assert other is not None and other.segment is not read.segment
    shelf.close()


def test_what_finds_no_room_is_gone_and_memory_stays_in_bounds() -> None:
    shelf = Shelf(readers=1, max_bytes=2 * roomy(MIB))
    for value in range(5):
        shelf.put(f"p{value}", encoded(value))
        assert shelf.size_bytes <= 2 * roomy(MIB)
    assert [shelf.is_gone(f"p{value}") for value in range(5)] == [True, True, True, False, False]
    read = [shelf.take("p3", 1), shelf.take("p4", 1)]
    shelf.put("p5", encoded(5))
    assert shelf.is_gone("p5")  # both segments are being read
    assert read[0] is not None and read[1] is not None
    for taken in read:
        shelf.let_go(taken)
    shelf.put("p6", encoded(6, 8 * MIB))  # larger than the bound: alone
    large = shelf.take("p6", 1)
    assert large is not None and shelf.size_bytes == roomy(large.size_bytes)
    shelf.close()


# ---- leader and followers -----------------------------------------------------------------------


def test_packs_come_to_every_follower_in_any_order(leader: Leader, name: str) -> None:
    followers = [Follower(name), Follower(name)]
    for value in range(3):
        leader.put(f"p{value}", pack_of(value))
    for peer, order in ((1, (0, 1, 2)), (2, (2, 0, 1))):
        got = [value_of(followers[peer - 1].take(request(v, peer=peer))) for v in order]
        assert got == list(order)
    assert leader.shelf.num_packs == 0
    for follower in followers:
        follower.close()
    wait_until(lambda: leader.connections == 0)
    assert leader.take(request(1)) is None


def test_a_pack_that_was_handed_on_does_not_change(leader: Leader, follower: Follower) -> None:
    leader.put("p1", pack_of(1))
    kept = follower.take(request(1))
    for value in range(2, 12):
        leader.put(f"p{value}", pack_of(value))
        assert value_of(follower.take(request(value))) == value
    assert value_of(kept) == 1


def test_a_follower_waits_for_a_pack_that_is_on_its_way(leader: Leader, follower: Follower) -> None:
    timer = threading.Timer(0.2, leader.put, ("p7", pack_of(7)))
    timer.start()
    assert value_of(follower.take(request(7))) == 7
    timer.join()


def test_after_a_wait_in_vain_it_asks_no_more_for_a_while(
    leader: Leader, follower: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "WAIT_S", 0.05)
    monkeypatch.setattr(relay, "PAUSES_S", (0.5, 0.5))
    assert follower.take(request(1)) is None
    leader.put("p1", pack_of(1))
    assert follower.take(request(1)) is None
    time.sleep(0.6)
    assert value_of(follower.take(request(1))) == 1


LEADER = """
import sys, time
from trainer_client.relay import Leader
leader = Leader(sys.argv[1], followers=1)
print("listens", flush=True)
time.sleep(60)
"""


def test_a_leader_that_is_stopped_costs_a_moment(name: str, follower: Follower) -> None:
    """It takes connections, by its kernel, and answers nothing."""
    process = subprocess.Popen(
        [sys.executable, "-c", LEADER, name], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "listens\n"
        started = time.monotonic()
        assert follower.take(request(1, wait_s=0.1)) is None
        assert follower._client is not None and not follower._client.closed  # it said "not yet"
        follower._not_before = 0.0
        process.send_signal(signal.SIGSTOP)
        started = time.monotonic()
        assert follower.take(request(1)) is None
        took_s = [time.monotonic() - started]
        for _ in range(2):
            follower._not_before = 0.0
            started = time.monotonic()
            assert follower.take(request(1)) is None
            took_s.append(time.monotonic() - started)
        print(f"waits for a stopped leader: {took_s} s")
        most_s = relay.ASK_S + relay.ANSWER_S
        assert all(seconds < most_s + 1.0 for seconds in took_s)
    finally:
        process.kill()
        process.communicate(timeout=30)


def test_at_the_descriptor_limit_the_leader_rests_and_goes_on(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = [0]

    class Full(socket.socket):
        def accept(self) -> Any:
            tries[0] += 1
            if tries[0] <= 2:
                raise OSError(errno.EMFILE, "too many open files")
            return super().accept()

    monkeypatch.setattr(relay, "new_socket", lambda: Full(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    monkeypatch.setattr(relay, "ACCEPT_PAUSE_S", 0.2)
    monkeypatch.setattr(relay, "TICK_S", 0.05)
    leader, follower = Leader(name, followers=1), Follower(name)
    try:
        leader.put("p1", pack_of(1))
        started = time.monotonic()
        assert value_of(follower.take(request(1))) == 1
        assert tries[0] == 3 and time.monotonic() - started >= 0.35
    finally:
        follower.close()
        leader.close()


def test_a_pack_that_is_gone_is_refused_at_once(leader: Leader, follower: Follower) -> None:
    for value in range(6):
        leader.put(f"p{value}", pack_of(value))
    assert follower.take(request(0)) is None
    assert value_of(follower.take(request(5))) == 5  # it goes on asking
    assert leader.shelf.size_bytes <= 4 * roomy(MIB)


def test_a_follower_that_leaves_gives_its_segment_back(leader: Leader, name: str) -> None:
    for value in range(30):
        follower = Follower(name)
        leader.put(f"p{value}", pack_of(value))
        assert value_of(follower.take(request(value))) == value
        follower.close()
        wait_until(lambda: leader.connections == 0)
    assert leader.shelf.size_bytes <= 4 * roomy(MIB)


def test_when_the_leader_ends_the_follower_fetches_for_itself(
    leader: Leader, follower: Follower
) -> None:
    leader.put("p1", pack_of(1))
    assert value_of(follower.take(request(1))) == 1
    timer = threading.Timer(0.2, leader.close)
    timer.start()
    assert follower.take(request(2)) is None
    timer.join()
    assert follower.take(request(3)) is None
    assert leader.shelf.size_bytes == 0
    leader.put("p9", pack_of(9))  # heard by nobody
    leader.close()


def test_closing_a_follower_ends_its_wait(leader: Leader, follower: Follower) -> None:
    timer = threading.Timer(0.2, follower.close)
    started = time.monotonic()
    timer.start()
    assert follower.take(request(1)) is None
    timer.join()
    assert time.monotonic() - started < relay.WAIT_S
    assert follower.take(request(1)) is None
    assert leader.connections <= 1


def test_without_a_leader_nothing_waits_twice(
    follower: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "FIRST_CONNECT_S", 0.1)
    assert follower.take(request(1)) is None
    monkeypatch.setattr(relay, "FIRST_CONNECT_S", 60.0)
    assert follower.take(request(1)) is None


def test_two_threads_share_a_follower(leader: Leader, follower: Follower) -> None:
    waiting = threading.Thread(target=lambda: got.append(follower.take(request(1))))
    got: list[Pack | None] = []
    waiting.start()
    wait_until(lambda: leader.connections == 1)
    assert follower.take(request(2)) is None
    leader.put("p1", pack_of(1))
    waiting.join(20)
    assert value_of(got[0]) == 1


def test_whoever_says_nonsense_is_dropped(leader: Leader, name: str) -> None:
    from dataservice.rpc.local import address_of, new_socket

    with new_socket() as sock:
        sock.connect(address_of(name))
        sock.send(b"nonsense")
        sock.settimeout(20)
        assert sock.recv(100) == b"packs"
        assert sock.recv(100) == b""
    wait_until(lambda: leader.connections == 0)


def test_processes_of_other_users_are_turned_away(
    leader: Leader, follower: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "same_user", lambda _sock: False)
    monkeypatch.setattr(relay, "FIRST_CONNECT_S", 0.1)
    leader.put("p1", pack_of(1))
    assert follower.take(request(1)) is None
    assert leader.connections == 0


def test_a_forked_child_keeps_no_name(leader: Leader, name: str) -> None:
    held, release = os.pipe()
    forked, is_forked = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(is_forked, b"\0")
        os.read(held, 1)
        os._exit(0)
    try:
        os.read(forked, 1)
        leader.close()
        Leader(name, followers=1).close()  # the name is free while the child lives
    finally:
        os.write(release, b"\0")
        os.waitpid(child, 0)
        for fd in (held, release, forked, is_forked):
            os.close(fd)


# ---- who is who ---------------------------------------------------------------------------------


def test_the_first_peer_of_a_host_leads(tmp_path: Any) -> None:
    opening = OpenSession(
        job="j",
        run_id=f"{tmp_path}" * 20,
        dp_rank=3,
        dp_size=4,
        micro_steps=1,
        packs_per_cell=1,
        state=None,
        host="h",
        wait_s=0.0,
        peer=2,
        peers=6,
    )
    opened = SessionOpened(ready=True, host_peers=(2, 3, 5))
    leader = relay_of(opened, opening)
    assert isinstance(leader, Leader)
    assert relay_of(opened, opening) is None  # somebody has the name
    follower = relay_of(opened, replace(opening, peer=5))
    assert isinstance(follower, Follower)
    leader.put("p1", pack_of(1))
    assert value_of(follower.take(request(1, peer=5))) == 1
    for alone in (replace(opened, host_peers=(2,)), replace(opened, host_peers=(0, 1))):
        assert relay_of(alone, opening) is None
    follower.close()
    leader.close()

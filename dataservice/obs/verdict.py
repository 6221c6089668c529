"""Whether any rank of the trainer waits, and for whom: one sentence from the service's status.

Invariants: a pure function of the status; the first thing that is wrong is what it says, and a
share below QUIET counts as no wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

Level = Literal["ok", "idle", "warning", "error"]

QUIET = 0.02
"""Of a rank's time."""
BUSY = 0.85
"""Of workers' decode threads: these are what limits."""
COLD = 0.5
"""Of the bytes read, from the origin: storage may be what limits."""
SILENT_S = 30.0
START_S = 40.0
"""So long a session's start is in the shares."""


class Verdict(TypedDict):
    level: Level
    text: str
    """One sentence without its full stop."""
    why: str
    """What it rests on or what to do, a sentence or two; "" where there is no more to say."""


def verdict_of(status: Mapping[str, Any]) -> Verdict:
    """Of what GetStatus answers; fields that are missing count as unknown."""
    session = status.get("session")
    if status.get("state") == "opening":
        return _verdict("idle", "The service is opening its index", "Trainers wait until it has.")
    if session is None and status.get("opening"):
        return _of_opening(status["opening"])
    if session is None:
        return _verdict("idle", "No trainer has come yet", _ready(status))
    if session["failure"]:
        return _verdict("error", "The run has failed", str(session["failure"]))
    if all(session["closed"]):
        ended = 0 <= session["end_step"] <= session["done_step"]
        text = "The run is over" if ended else "Every rank has closed its stream"
        return _verdict("idle", text, f"{session['done_step']:,} steps were given out.")
    if not status.get("workers"):
        missing = status.get("workers_without_room", 0)
        room = f"Ray has no room for {missing} of them." if missing else "None has joined yet."
        return _verdict("error", "Every rank waits: no worker is alive", room)
    return _of_waits(status, session)


def _of_opening(opening: Mapping[str, Any]) -> Verdict:
    missing, ranks = opening["missing_ranks"], f"of {opening['dp_size']:,} ranks"
    if not missing:
        return _verdict("idle", "The run is opening", str(opening["waiting_for"]))
    first = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    text = f"The run waits for {len(missing):,} {ranks} to come"
    return _verdict("idle", text, f"Missing: {first}.")


def _of_waits(status: Mapping[str, Any], session: Mapping[str, Any]) -> Verdict:
    shares: Sequence[float] = session.get("waited_share", ())
    worst = max(shares, default=0.0)
    if worst < QUIET:
        silent = _silent(session)
        if silent:
            return _verdict("warning", "No rank reports", silent)
        return _verdict("ok", "No rank is waiting", _ready(status))
    waiting = _waiting(shares)
    who = _who(waiting, len(shares))
    of_time = f"{_percent(worst)} of {'its' if len(waiting) == 1 < len(shares) else 'their'} time"
    it = "it" if len(waiting) == 1 else "them"
    meet = f" Ranks that meet {it} in a collective wait too."
    others = "" if len(waiting) == len(shares) else meet
    rank = max(range(len(shares)), key=shares.__getitem__)
    for_workers = session.get("waited_workers_share", shares)[rank]
    if for_workers >= worst / 2:
        cause, why = _bottleneck(status)
        level: Level = "error" if worst >= 0.2 else "warning"
        return _verdict(level, f"{who} {of_time} for workers: {cause}", why + others)
    if session.get("open_for_s", START_S) < START_S:
        why = "Waits before the first batches are not for workers; they leave the figures soon."
        return _verdict("idle", "The run has just begun, or gone on", why)
    if status.get("planning_waits"):
        return _verdict("error", f"{who} {of_time} for the plan", str(status["planning_waits"]))
    slowest = _slowest(session)
    if slowest is not None:
        rank, why = slowest
        return _verdict("warning", f"All wait for rank {rank}", why)
    return _verdict(
        "warning",
        f"{who} {of_time} for steps to be handed out",
        "The plan is not far enough ahead: see serving.plan_ahead_steps, and the coordinator's "
        f"cores.{others}",
    )


def _waiting(shares: Sequence[float]) -> list[int]:
    """The one rank that waits far longer than any other; else all that wait."""
    order = sorted(range(len(shares)), key=shares.__getitem__, reverse=True)
    if len(order) > 1 and shares[order[1]] < shares[order[0]] / 2:
        return order[:1]
    return [rank for rank in order if shares[rank] >= QUIET]


def _who(waiting: Sequence[int], num_ranks: int) -> str:
    if len(waiting) == num_ranks:
        return "Ranks wait up to" if num_ranks > 1 else "The rank waits"
    if len(waiting) == 1:
        return f"Rank {waiting[0]} waits"
    return f"{len(waiting):,} of {num_ranks:,} ranks wait up to"


def _bottleneck(status: Mapping[str, Any]) -> tuple[str, str]:
    workers = [w for w in status["workers"] if not w["draining"]]
    if not workers:
        count = len(status["workers"])
        return (
            "no worker takes new packs",
            f"{'All' if count != 1 else 'The'} {count:,} worker{'s' if count != 1 else ''} that "
            "there are drain: take a node back, or give the service more nodes or workers.",
        )
    hung = sum(w.get("stuck_reads", 0) for w in workers)
    if hung:
        return "reads hang", f"{hung} reads are past their deadline: look at the storage."
    busy = [w["busy_share"] for w in workers if "busy_share" in w]
    share = sum(busy) / len(busy) if busy else status.get("scaling", {}).get("busy_share", 0.0)
    staged = sum(w["read_staged_bytes"] for w in workers)
    read = staged + sum(w["read_origin_bytes"] for w in workers)
    cold = bool(status.get("stagers")) and read and 1 - staged / read > COLD
    missing = sum(s["missing_bytes"] for s in status.get("stagers", ()))
    if cold and missing:
        return (
            "staging is behind",
            f"{_percent(1 - staged / read)} of what workers read came from the origin, and "
            f"{_size(missing)} are still to be staged.",
        )
    if share >= BUSY:
        count = len(workers)
        return (
            "decode is the bottleneck",
            f"{count:,} worker{'s are' if count != 1 else ' is'} busy {_percent(share)} of the "
            "time: more workers or cores would help.",
        )
    ready = sum(w["ready_packs"] for w in workers)
    if ready:
        return (
            "packs are ready but come slowly",
            f"{ready:,} packs are ready and workers are busy {_percent(share)} of the time: look "
            "at the network, and at prefetch_packs of the trainers.",
        )
    return (
        "reading is the bottleneck",
        f"Workers are busy {_percent(share)} of the time and have no pack ready: look at the "
        "storage they read from.",
    )


def _slowest(session: Mapping[str, Any]) -> tuple[int, str] | None:
    """The one rank that is behind all others, if there is one."""
    done = [tuple(place) for place in session["done"]]
    rank = min(range(len(done)), key=done.__getitem__)
    if len(done) < 2 or sum(place[0] <= done[rank][0] for place in done) > 1:
        return None
    ago = session["heard_s_ago"][rank]
    step, micro_step = done[rank]
    state = (
        "has closed its stream" if session["closed"][rank] else f"was last heard {ago:.0f} s ago"
    )
    return rank, (
        f"It is at step {step} micro-step {micro_step}, the others are further, and {state}."
    )


def _silent(session: Mapping[str, Any]) -> str:
    heard = session.get("heard_s_ago", ())
    quietest = max(range(len(heard)), key=heard.__getitem__, default=-1)
    if quietest < 0 or min(heard) < SILENT_S:
        return ""
    return (
        f"All of them were silent for {min(heard):.0f} s, rank {quietest} for "
        f"{heard[quietest]:.0f} s: they compute for long, have stopped, or were cut off."
    )


def _ready(status: Mapping[str, Any]) -> str:
    workers = status.get("workers", ())
    if not workers:
        return "No worker has joined yet."
    ready = sum(w["ready_packs"] for w in workers)
    size = _size(sum(w["ready_bytes"] for w in workers))
    return f"{ready:,} packs ({size}) are ready on {len(workers):,} worker" + (
        "s." if len(workers) != 1 else "."
    )


def _verdict(level: Level, text: str, why: str = "") -> Verdict:
    return {"level": level, "text": text, "why": why}


def _percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")


def _size(size_bytes: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if size_bytes < 1000:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.3g} TB"

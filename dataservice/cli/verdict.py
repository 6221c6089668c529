"""Whether any rank waits, and for whom, in one sentence, from the status of a service.

Invariants: a pure function of the report; fields that an older service does not tell are not
needed; a share of waiting below WAITS is called none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dataservice.core.autoscale import BUSY_TO_GROW, WAITS

Level = Literal["good", "waits", "bad", "idle"]
SILENT_S = 30.0
"""A rank that was not heard for longer is named."""


@dataclass(frozen=True, slots=True)
class Verdict:
    level: Level
    words: str


def verdict(report: dict[str, Any], shares: Sequence[float]) -> Verdict:
    """`shares`: of its time that each rank waited lately, 0..1; empty while that is not known."""
    session = report.get("session")
    if report.get("state") == "opening":
        return Verdict("idle", "The service is opening its index.")
    if session is not None and session.get("failure"):
        return Verdict("bad", f"The run has failed: {session['failure']}")
    if report.get("winding_down"):
        return Verdict("idle", "The service drains: no more steps are handed out.")
    if session is None:
        return Verdict("idle", f"No trainer has connected yet. {_without_workers(report)}".strip())
    if all(session.get("closed") or [False]):
        return Verdict("idle", f"Every rank has closed its stream of run {session['run_id']}.")
    waiting = [rank for rank, share in enumerate(shares) if share > WAITS]
    if not waiting:
        return Verdict("good", "No rank is waiting." if shares else "Looking for ranks that wait.")
    longest = max(waiting, key=lambda rank: shares[rank])
    share = shares[longest]
    who = f"Rank {longest} waits" if len(waiting) == 1 else f"{len(waiting)} ranks wait"
    most = f" {share:.0%} of its time" if len(waiting) == 1 else f", the longest {share:.0%}"
    return Verdict("waits", f"{who}{most}{_for_whom(report, session, waiting)}")


def _without_workers(report: dict[str, Any]) -> str:
    return "" if report.get("workers") else "No worker is alive."


def _for_whom(report: dict[str, Any], session: dict[str, Any], waiting: list[int]) -> str:
    workers = report.get("workers", [])
    if not workers:
        return ": no worker is alive."
    scaling = report.get("scaling") or {}
    if scaling.get("waited_share", 0.0) > WAITS:
        return f" (for workers): {_why_workers(workers, scaling)}."
    last = _last_rank(session)
    if last is not None and last not in waiting:
        of_its = ", for rank" if len(waiting) > 1 else " for rank"
        return f"{of_its} {last}, which is behind all others{_silence(session, last)}."
    if report.get("counting") and report["counting"].get("waiting_for"):
        return f" (for the plan): {report['counting']['waiting_for']}."
    return " for steps: ranks read faster than each other or than steps are planned."


def _why_workers(workers: list[dict[str, Any]], scaling: dict[str, Any]) -> str:
    if any(worker.get("stuck_reads") for worker in workers):
        return "storage does not answer"
    if not any(worker.get("queued_packs") for worker in workers):
        return "but they have nothing left to build"
    if scaling.get("busy_share", 0.0) < BUSY_TO_GROW:
        return "they are not busy, so reading is slow"
    return "decoding is the bottleneck"


def _last_rank(session: dict[str, Any]) -> int | None:
    """The one rank that is behind all others."""
    done = [tuple(place) for place in session.get("done", [])]
    if len(done) < 2:
        return None
    least = min(done)
    return done.index(least) if done.count(least) == 1 else None


def _silence(session: dict[str, Any], rank: int) -> str:
    heard = session.get("heard_s_ago", [])
    if rank < len(heard) and heard[rank] > SILENT_S:
        return f" and was last heard {heard[rank]:.0f} s ago"
    return ""

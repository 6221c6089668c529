"""When each of many ranks or workers asks, so that they do not all ask at once or too often.

Invariants: pure functions of small numbers; a few ranks ask as soon as they can.
"""

from __future__ import annotations

HEARTBEATS_S = 128
"""Of all workers together; a call costs the coordinator 0.3 to 0.5 ms."""
REPORTS_S = 64
"""Of all ranks together."""
LEAST_POLL = 0.7
"""Of the longest one."""
_GOLDEN = 2654435761


def ask_at(dp_rank: int, micro_steps: int) -> int:
    """Micro-step from which on a rank asks for the step behind the one that it reads.

    Ranks come to a step together, and one that knows the step need not hurry for the next: they ask
    over the first half of it.
    """
    share = dp_rank * _GOLDEN % 2**32
    return share * (micro_steps // 2) >> 32


def report_s(dp_size: int, least: float) -> float:
    """Seconds after which a rank with nothing to ask tells of its progress."""
    return max(least, dp_size / REPORTS_S)


def lease_of(num_workers: int, least: float) -> float:
    """Seconds for which a worker may be silent, who is heard at least twice meanwhile."""
    return max(least, 2 * num_workers / HEARTBEATS_S)


def poll_s(longest: float, draw: float) -> float:
    """Seconds for which a poll without news is held; `draw` is from [0, 1).

    Those who were told something together ask again together, and would for ever if their polls
    took the same time.
    """
    return longest * (LEAST_POLL + (1.0 - LEAST_POLL) * draw)

"""What `dataservice drain` does: asks the coordinator, and again until nothing is left.

Invariants: a coordinator that is being started again meanwhile is waited for; asking again changes
nothing.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from dataservice.errors import DeadlineExceeded, ServiceUnavailable
from dataservice.rpc.client import CoordinatorClient
from dataservice.wire.draining import Drain, Drained

CALL_TIMEOUT_S = 10.0
ASK_EVERY_S = 1.0


def drain(
    client: CoordinatorClient,
    request: Drain,
    *,
    timeout_s: float | None,
    say: Callable[[str], None],
) -> Drained:
    """How far it is once it is done, and after `timeout_s` in any case; None: at once. `say` is
    told of each change. Raises what the first answer is, and ServiceUnavailable or
    DeadlineExceeded where nobody answers at the end."""
    told: Drained = client.call(request, CALL_TIMEOUT_S)
    if timeout_s is None:
        return told
    request = dataclasses.replace(request, again=True)
    until = time.monotonic() + timeout_s
    words = ""
    while not told.done:
        if told.words != words:
            words = told.words
            say(words)
        left_s = until - time.monotonic()
        if left_s <= 0:
            break
        time.sleep(min(ASK_EVERY_S, left_s))
        try:
            told = client.call(request, CALL_TIMEOUT_S)
        except (ServiceUnavailable, DeadlineExceeded) as error:
            if time.monotonic() >= until:
                raise
            say(f"{error}; trying again")
            words = ""
    return told

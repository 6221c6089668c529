"""What a caller says of its trace, in the metadata of its call (W3C Trace Context).

Invariants: costs nothing until somebody wants it; only headers of that standard are kept, and no
more of them than it allows.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

__all__ = ["note_caller", "trace_headers", "want_traces"]

HEADERS = ("traceparent", "tracestate")
MOST_CHARS = 512

_wanted = False
_HEADERS: ContextVar[Mapping[str, str] | None] = ContextVar("trace_headers", default=None)


def want_traces(wanted: bool = True) -> None:
    """For this process."""
    global _wanted
    _wanted = wanted


def note_caller(context: Any) -> None:
    """At the start of a call, which is a task of its own."""
    if not _wanted:
        return
    _HEADERS.set(
        {
            name: value
            for name, value in context.invocation_metadata() or ()
            if name in HEADERS and isinstance(value, str) and len(value) <= MOST_CHARS
        }
    )


def trace_headers() -> Mapping[str, str]:
    """Of the call that is being answered; empty where it has none, or nobody wants them."""
    return _HEADERS.get() or {}

"""Logs of the service's processes on stderr: plain lines, or one JSON object a line.

Invariants: a JSON line says which process wrote it, of which job, and, where that is known, of
which step, micro-step, rank and pack it tells; what is not known is left out; text that others
chose cannot end a line.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, cast

from dataservice.errors import ConfigError

__all__ = ["FORMAT_VARIABLE", "LogFormat", "Logs", "bound"]

LogFormat = Literal["text", "json"]
FORMAT_VARIABLE = "DATASERVICE_LOG_FORMAT"
LEVEL_VARIABLE = "DATASERVICE_LOG"
JOB_VARIABLE = "DATASERVICE_LOG_JOB"
TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

_BOUND: ContextVar[Mapping[str, Any]] = ContextVar("log_fields", default={})  # noqa: B039


@contextmanager
def bound(**fields: Any) -> Iterator[None]:
    """What is logged inside, by this thread or task, has these fields besides."""
    token = _BOUND.set({**_BOUND.get(), **fields})
    try:
        yield
    finally:
        _BOUND.reset(token)


@dataclass(frozen=True, kw_only=True, slots=True)
class Logs:
    """How the processes of one service log; given to each where it starts."""

    format: LogFormat = "text"
    job: str = ""

    @classmethod
    def from_environment(cls, *, job: str = "") -> Logs:
        """Of DATASERVICE_LOG_FORMAT. Raises ConfigError for another value than text or json."""
        given = os.environ.get(FORMAT_VARIABLE) or "text"
        if given not in ("text", "json"):
            raise ConfigError(f'{FORMAT_VARIABLE} is "{given}", must be text or json')
        return cls(format=cast(LogFormat, given), job=job or os.environ.get(JOB_VARIABLE, ""))

    def install(self, level: str = "WARNING", **about: Any) -> None:
        """For this process, and for those that it starts.

        `level`: of this project's own lines, unless DATASERVICE_LOG says otherwise; others' have
        WARNING. `about`: who this process is, such as role and id.
        """
        os.environ[FORMAT_VARIABLE], os.environ[JOB_VARIABLE] = self.format, self.job
        logging.basicConfig(level="WARNING", format=TEXT)
        logging.getLogger("dataservice").setLevel(os.environ.get(LEVEL_VARIABLE, level))
        self.dress(**about)

    def dress(self, **about: Any) -> None:
        """Formats what is logged from now on; levels and places stay."""
        if self.format == "text":
            return
        job = {"job": self.job} if self.job else {}
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonFormatter({**job, **about}))


class JsonFormatter(logging.Formatter):
    """`about`: fields of every line."""

    def __init__(self, about: Mapping[str, Any]) -> None:
        super().__init__()
        self._about = dict(about)

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **self._about,
            "pid": record.process,
            **_BOUND.get(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)

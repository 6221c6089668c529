"""Errors across the wire: a DataServiceError leaves as a gRPC status and arrives as its own class.

Invariants: the class name travels in the trailing metadata `dataservice-error`, the text and (of a
DataError) where in `dataservice-error-bin`; texts are cut so that all metadata of a failure stays
below 8 KiB, the size gRPC guarantees; whatever a service answers with has a class, INTERNAL that of
DataServiceError; a class that this version does not know, or a status set by gRPC itself, becomes
the error that its status code means.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

import grpc

from dataservice import errors
from dataservice.errors import DataError, DataServiceError
from dataservice.wire.schema import decode, encode

_LOG = logging.getLogger(__name__)

ERROR_CLASS_KEY = "dataservice-error"
ERROR_BODY_KEY = "dataservice-error-bin"
MAX_TEXT_BYTES = 2000
MAX_PLACE_BYTES = 500
MAX_DETAILS_BYTES = 300

Metadata = tuple[tuple[str, str | bytes], ...]

_CLASSES: dict[str, type[DataServiceError]] = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, DataServiceError)
}

_CODES: tuple[tuple[type[DataServiceError], grpc.StatusCode], ...] = (
    (errors.AccessRefused, grpc.StatusCode.UNAUTHENTICATED),
    (errors.ConfigError, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.WireError, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.DataError, grpc.StatusCode.DATA_LOSS),
    (errors.StaleIndexError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.ResumeRefused, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.SessionFenced, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.StorageError, grpc.StatusCode.ABORTED),
    (errors.HoleBudgetExceeded, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.ServiceUnavailable, grpc.StatusCode.UNAVAILABLE),
    (errors.DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
    (errors.DataServiceError, grpc.StatusCode.UNKNOWN),
)


_DAMAGED = {
    grpc.StatusCode.INTERNAL: "INTERNAL",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "a message is larger than its limit",
    grpc.StatusCode.UNIMPLEMENTED: "is this the right endpoint, and the same version?",
}
"""What gRPC says of headers, lengths and method names that are not what was sent, too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorBody:
    text: str
    source: str = ""
    shard: str = ""
    sample: str = ""
    member: str = ""


def status_of(error: DataServiceError) -> tuple[grpc.StatusCode, str, Metadata]:
    """(code, details, trailing metadata) that carry `error` to the caller."""
    code = next(code for cls, code in _CODES if isinstance(error, cls))
    if isinstance(error, DataError):
        body = ErrorBody(
            text=cut(error.reason, MAX_TEXT_BYTES),
            source=cut(error.source, MAX_PLACE_BYTES),
            shard=cut(error.shard, MAX_PLACE_BYTES),
            sample=cut(error.sample, MAX_PLACE_BYTES),
            member=cut(error.member, MAX_PLACE_BYTES),
        )
    else:
        body = ErrorBody(text=cut(str(error), MAX_TEXT_BYTES))
    name = next(cls.__name__ for cls in type(error).__mro__ if cls.__name__ in _CLASSES)
    metadata = ((ERROR_CLASS_KEY, name), (ERROR_BODY_KEY, encode(body)))
    return code, cut(str(error), MAX_DETAILS_BYTES), metadata


def failure_of(method: str, error: Exception) -> tuple[grpc.StatusCode, str, Metadata]:
    """As `status_of`, for whatever a service's method raised; what it should not is logged."""
    if isinstance(error, DataServiceError):
        return status_of(error)
    _LOG.error("%s failed", method, exc_info=error)
    details = f"{method} failed with {type(error).__name__}; the service's log has the rest"
    _, _, metadata = status_of(DataServiceError(details))
    return grpc.StatusCode.INTERNAL, details, metadata


def error_of(
    *,
    code: grpc.StatusCode,
    details: str | None,
    metadata: Iterable[tuple[str, str | bytes]] | None,
    call: str,
    timeout_s: float,
) -> DataServiceError:
    """The error that a failed call raises; `call` names method and endpoint, for the text."""
    fields = dict(metadata or ())
    cls = _CLASSES.get(str(fields.get(ERROR_CLASS_KEY, "")))
    body = fields.get(ERROR_BODY_KEY)
    if cls is not None and isinstance(body, bytes):
        error = _rebuilt(cls, decode(ErrorBody, body))
        error.answered = True
        error.add_note(f"answered by {call}")
        return error
    return _meaning(code, f"{call}: {details or code.name}", call, timeout_s)


def is_ours(metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
    """Whether a failed call was answered by the service, rather than ended by gRPC."""
    return any(key == ERROR_CLASS_KEY for key, _ in metadata or ())


def _rebuilt(cls: type[DataServiceError], body: ErrorBody) -> DataServiceError:
    if issubclass(cls, DataError):
        return cls(
            body.text,
            source=body.source,
            shard=body.shard,
            sample=body.sample,
            member=body.member,
        )
    return cls(body.text)


def _meaning(code: grpc.StatusCode, text: str, call: str, timeout_s: float) -> DataServiceError:
    """What a status without our metadata means: it comes from gRPC, or from a bug in a handler."""
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.DeadlineExceeded(f"{call}: no answer within {timeout_s:g} s")
    if code in (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.UNKNOWN,
    ):
        return errors.ServiceUnavailable(text)
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return errors.AccessRefused(text)
    damaged = _DAMAGED.get(code)
    if damaged is not None:
        return errors.DamagedMessage(f"{text} ({damaged})")
    return DataServiceError(f"{text} ({code.name})")


def cut(text: str, max_bytes: int) -> str:
    """`text` as valid Unicode of at most `max_bytes` bytes of UTF-8, "..." at the end when cut."""
    data = text.encode("utf-8", "replace")
    if len(data) <= max_bytes:
        return data.decode("utf-8")
    return data[: max_bytes - 3].decode("utf-8", "ignore") + "..."

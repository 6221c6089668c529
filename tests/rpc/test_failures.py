"""dataservice.rpc.failures: what fits into metadata, and what statuses of gRPC itself mean."""

from __future__ import annotations

import grpc
import pytest

from dataservice import errors
from dataservice.rpc.failures import cut, error_of, status_of

CODES = grpc.StatusCode


def rebuilt(error: errors.DataServiceError) -> errors.DataServiceError:
    code, details, metadata = status_of(error)
    return error_of(code=code, details=details, metadata=metadata, call="X at y:1", timeout_s=1.0)


def test_metadata_stays_below_what_grpc_guarantees() -> None:
    huge = "\N{GRINNING FACE}" * 100_000
    error = errors.ImageError(huge, source=huge, shard=huge, sample=huge, member=huge)
    _, details, metadata = status_of(error)
    size = sum(len(key) + len(value) * 4 // 3 for key, value in metadata)
    assert size + 3 * len(details.encode()) < 8000
    again = rebuilt(error)
    assert isinstance(again, errors.ImageError)
    assert again.reason.endswith("...")
    assert huge.startswith(again.reason.removesuffix("..."))


def test_a_subclass_that_the_other_side_does_not_know_arrives_as_its_base() -> None:
    class TooBright(errors.ImageError):
        pass

    again = rebuilt(TooBright("glare", member="a.jpg"))
    assert type(again) is errors.ImageError
    assert str(again) == "member a.jpg: glare"


def test_a_class_name_of_a_newer_version_falls_back_to_the_status() -> None:
    metadata = (("dataservice-error", "FutureError"), ("dataservice-error-bin", b"\x80"))
    error = error_of(
        code=CODES.UNAVAILABLE, details="gone", metadata=metadata, call="X at y:1", timeout_s=1.0
    )
    assert type(error) is errors.ServiceUnavailable


@pytest.mark.parametrize(
    ("code", "cls", "text"),
    [
        (CODES.UNAVAILABLE, errors.ServiceUnavailable, "X at y:1: words"),
        (CODES.CANCELLED, errors.ServiceUnavailable, "X at y:1: words"),
        (CODES.UNKNOWN, errors.ServiceUnavailable, "X at y:1: words"),
        (CODES.DEADLINE_EXCEEDED, errors.DeadlineExceeded, "X at y:1: no answer within 2.5 s"),
        (CODES.RESOURCE_EXHAUSTED, errors.DamagedMessage, "larger than its limit"),
        (CODES.UNIMPLEMENTED, errors.DamagedMessage, "same version"),
        (CODES.INTERNAL, errors.DamagedMessage, "X at y:1: words (INTERNAL)"),
    ],
)
def test_the_meaning_of_a_status_set_by_grpc(
    code: grpc.StatusCode, cls: type[errors.DataServiceError], text: str
) -> None:
    error = error_of(code=code, details="words", metadata=None, call="X at y:1", timeout_s=2.5)
    assert type(error) is cls
    assert text in str(error)


def test_cut_keeps_whole_characters() -> None:
    assert cut("ä" * 10, 20) == "ä" * 10
    assert cut("ä" * 10, 10) == "äää..."
    assert cut("\ud800", 10) == "?"

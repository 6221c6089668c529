"""Spans of steps, as the exporter of OpenTelemetry's SDK gets them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support.demo_config import demo_config
from support.local_service import LocalService

from dataservice.errors import ConfigError
from dataservice.obs import tracing
from dataservice.obs.tracing import VARIABLE, NoSpans, StepSpans, step_spans
from dataservice.rpc import caller, client
from trainer_client import PackStream, ParallelLayout

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
OTHER = "1bf7651916cd43dd8448eb211c80319c"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def spans(exporter: InMemorySpanExporter) -> StepSpans:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return StepSpans(provider.get_tracer("test"))


class Context:
    def __init__(self, *metadata: tuple[str, Any]) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> tuple[tuple[str, Any], ...]:
        return self._metadata


@pytest.fixture
def wanted() -> Any:
    caller.want_traces()
    yield
    caller.want_traces(False)
    caller._HEADERS.set(None)


def test_a_span_a_step_in_the_first_callers_trace(
    spans: StepSpans, exporter: InMemorySpanExporter, wanted: None
) -> None:
    caller.note_caller(Context(("traceparent", f"00-{TRACE}-{PARENT}-01"), ("other", "x")))
    spans.handed_out(4, lambda: {"step": 4})
    caller.note_caller(Context(("traceparent", f"00-{OTHER}-{PARENT}-01")))
    spans.handed_out(4, lambda: pytest.fail("asked for once"))
    caller.note_caller(Context())
    spans.handed_out(5, lambda: {"step": 5})
    spans.end_before(4)
    assert not exporter.get_finished_spans()
    spans.end_before(5)
    (span,) = exporter.get_finished_spans()
    assert span.name == "dataservice.step" and span.attributes == {"dataservice.step": 4}
    assert span.parent is not None and f"{span.parent.span_id:016x}" == PARENT
    assert f"{span.context.trace_id:032x}" == TRACE
    assert [f"{link.context.trace_id:032x}" for link in span.links] == [OTHER]
    spans.close()
    spans.close()
    assert exporter.get_finished_spans()[1].parent is None


@pytest.mark.parametrize("given", ["nonsense", "0" * 600, b"\xff"])
def test_headers_that_are_none_are_left_out(
    spans: StepSpans, exporter: InMemorySpanExporter, wanted: None, given: Any
) -> None:
    caller.note_caller(Context(("traceparent", given)))
    spans.handed_out(1, dict)
    spans.close()
    assert exporter.get_finished_spans()[0].parent is None


def test_nothing_is_kept_where_nobody_wants_it() -> None:
    caller.note_caller(Context(("traceparent", f"00-{TRACE}-{PARENT}-01")))
    assert caller.trace_headers() == {}


def test_off_it_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert isinstance(step_spans(), NoSpans)
    code = (
        "import sys; import dataservice.actors.session_desk as desk; desk.step_spans(); "
        "assert 'opentelemetry' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_it_says_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match=r"DATASERVICE_TRACING is set.*\[tracing\]"):
        step_spans()


def test_the_sdk_makes_a_provider_of_its_variables() -> None:
    code = (
        "from dataservice.obs.tracing import step_spans; spans = step_spans(); "
        "spans.handed_out(3, lambda: {'step': 3}); spans.close()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={VARIABLE: "1", "OTEL_TRACES_EXPORTER": "console", "PATH": "", **_python_path()},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert '"name": "dataservice.step"' in done.stdout and '"dataservice.step": 3' in done.stdout


def test_an_exporter_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "carrier-pigeon")
    with pytest.raises(ConfigError, match=r'"carrier-pigeon", installed are .*console'):
        tracing._provider()


def _python_path() -> dict[str, str]:
    return {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}


class _Traced(grpc.UnaryUnaryClientInterceptor):
    """What instrumentation of a trainer's gRPC does."""

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        metadata = [*(details.metadata or ()), ("traceparent", f"00-{TRACE}-{PARENT}-01")]
        return continuation(details._replace(metadata=metadata), request)


def test_a_service_has_its_steps_in_the_trainers_trace(
    tmp_path: Path,
    spans: StepSpans,
    exporter: InMemorySpanExporter,
    wanted: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = grpc.insecure_channel
    monkeypatch.setattr(
        client.grpc,
        "insecure_channel",
        lambda *given, **more: grpc.intercept_channel(plain(*given, **more), _Traced()),
    )
    with LocalService(demo_config(tmp_path), workers=1) as service:
        service.coordinator.sessions.spans = spans
        with PackStream(
            service.endpoint, job="test", layout=ParallelLayout(), micro_steps=2
        ) as stream:
            for _ in range(5):
                next(stream)
    finished = {span.attributes["dataservice.step"]: span for span in exporter.get_finished_spans()}
    assert {0, 1} <= set(finished)
    for step in (0, 1):
        span = finished[step]
        assert f"{span.context.trace_id:032x}" == TRACE
        assert span.attributes["dataservice.micro_steps"] == 2
        assert span.attributes["dataservice.cost"] >= span.attributes["dataservice.cost_bound"]
        assert span.end_time > span.start_time

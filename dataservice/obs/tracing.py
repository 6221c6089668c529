"""A span of OpenTelemetry for every step that is handed out, where one wants them.

Invariants: off unless DATASERVICE_TRACING is 1, and then OpenTelemetry is not even imported; one
span a step, none a pack or sample; no more are open than steps are handed out; a trainer whose
calls carry a trace has the step in that trace.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Protocol

from dataservice.errors import ConfigError
from dataservice.rpc.caller import trace_headers, want_traces

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

__all__ = ["VARIABLE", "NoSpans", "Spans", "StepSpans", "step_spans"]

VARIABLE = "DATASERVICE_TRACING"
SPAN = "dataservice.step"
FLUSH_MS = 2000

Attributes = Mapping[str, int | float | str]


class Spans(Protocol):
    """For one event loop."""

    def handed_out(self, step: int, attributes: Callable[[], Attributes]) -> None:
        """To the caller that is being answered; the first one's trace has the step, the span has
        links to the others'."""
        ...

    def end_before(self, step: int) -> None:
        """Every rank is past these steps."""
        ...

    def close(self) -> None:
        """Ends what is open, and sends what was not sent; may take FLUSH_MS. Idempotent."""
        ...


class NoSpans:
    def handed_out(self, step: int, attributes: Callable[[], Attributes]) -> None:
        pass

    def end_before(self, step: int) -> None:
        pass

    def close(self) -> None:
        pass


class StepSpans:
    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._open: dict[int, Span] = {}

    def handed_out(self, step: int, attributes: Callable[[], Attributes]) -> None:
        from opentelemetry.trace import SpanKind, get_current_span
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        caller = TraceContextTextMapPropagator().extract(dict(trace_headers()))
        span = self._open.get(step)
        if span is None:
            self._open[step] = self._tracer.start_span(
                SPAN,
                context=caller,
                kind=SpanKind.SERVER,
                attributes={f"dataservice.{name}": value for name, value in attributes().items()},
            )
            return
        context = get_current_span(caller).get_span_context()
        if context.is_valid:
            span.add_link(context)

    def end_before(self, step: int) -> None:
        for number in [number for number in self._open if number < step]:
            self._open.pop(number).end()

    def close(self) -> None:
        from opentelemetry.trace import get_tracer_provider

        while self._open:
            self._open.popitem()[1].end()
        flush = getattr(get_tracer_provider(), "force_flush", None)  # the SDK's
        if flush is not None:
            flush(FLUSH_MS)


def step_spans() -> Spans:
    """As DATASERVICE_TRACING says. Where this process has no tracer provider, one of the SDK sends
    to the exporters that OTEL_TRACES_EXPORTER names, otlp by default. Raises ConfigError for what
    is not installed."""
    if os.environ.get(VARIABLE, "") in ("", "0"):
        return NoSpans()
    try:
        from opentelemetry import trace
    except ImportError:
        raise ConfigError(
            f"{VARIABLE} is set, and OpenTelemetry is not installed: pip install "
            "'vlm-dataservice[tracing]' opentelemetry-sdk, or unset it"
        ) from None
    want_traces()
    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        trace.set_tracer_provider(_provider())
    return StepSpans(trace.get_tracer("dataservice"))


def _provider() -> TracerProvider:
    try:
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise ConfigError(
            f"{VARIABLE} is set, and nothing here takes spans: pip install opentelemetry-sdk and "
            "an exporter, or unset it"
        ) from None
    os.environ.setdefault("OTEL_SERVICE_NAME", "dataservice")
    provider = TracerProvider()
    known = {entry.name: entry for entry in entry_points(group="opentelemetry_traces_exporter")}
    for name in os.environ.get("OTEL_TRACES_EXPORTER", "otlp").split(","):
        if name == "none":
            continue
        if name not in known:
            raise ConfigError(
                f'OTEL_TRACES_EXPORTER names "{name}", installed are {", ".join(sorted(known))}: '
                "install its package, such as opentelemetry-exporter-otlp, or name another"
            )
        provider.add_span_processor(BatchSpanProcessor(known[name].load()()))
    return provider

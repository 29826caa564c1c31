"""Spans by OpenTelemetry. Needs the extra `verbatim[otel]`; imported only where the settings ask for traces.

Owns the provider. All else is OpenTelemetry's own business, and its OTEL_* variables': where spans go, how many of them
(the sampler), which headers carry their parents.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import version
from types import TracebackType

from opentelemetry import propagate, trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode

from gateway.errors import GatewayError
from gateway.telemetry.tracing import Attributes, Span

SERVICE = "verbatim-gateway"
"""The service's name where OTEL_SERVICE_NAME gives none."""


class Otel:
    """Traces that go to `processor`, or, as a rule, over OTLP to where OTEL_EXPORTER_OTLP_* says."""

    def __init__(self, processor: SpanProcessor | None = None) -> None:
        own = {SERVICE_VERSION: version("verbatim")}
        if "OTEL_SERVICE_NAME" not in os.environ:
            own[SERVICE_NAME] = SERVICE
        self._provider = TracerProvider(resource=Resource.create(own), shutdown_on_exit=False)
        self._provider.add_span_processor(processor or BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("verbatim")

    def __repr__(self) -> str:
        return f"<Otel {self._provider!r}>"

    def request(self, headers: Mapping[str, str]) -> Span:
        """The span of a request."""
        parent = propagate.extract(headers)
        return OtelSpan(self._tracer, self._tracer.start_span("request", parent, SpanKind.SERVER))

    def close(self) -> None:
        """Hand over what is left; blocks until that is done, or the exporter gives up."""
        self._provider.shutdown()


class OtelSpan:
    """One of OpenTelemetry's spans."""

    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        self._tracer = tracer
        self._span = span
        self._context = trace.set_span_in_context(span)

    def __repr__(self) -> str:
        return f"<OtelSpan {self._span!r}>"

    @property
    def recording(self) -> bool:
        return self._span.is_recording()

    @property
    def headers(self) -> Mapping[str, str]:
        carrier: dict[str, str] = {}
        propagate.inject(carrier, self._context)
        return carrier

    def child(self, name: str, attributes: Attributes | None = None, *, calls: bool = False) -> Span:
        kind = SpanKind.CLIENT if calls else SpanKind.INTERNAL
        return OtelSpan(self._tracer, self._tracer.start_span(name, self._context, kind, attributes))

    def rename(self, name: str) -> None:
        self._span.update_name(name)

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def end(self, error: str = "") -> None:
        if error:
            self._span.set_attribute("error.type", error)
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()

    def __enter__(self) -> Span:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A generator that is closed early, or a task whose answer is wanted no more, did nothing wrong.
        failed = isinstance(error, Exception)
        self.end(
            (error.code or error.type) if isinstance(error, GatewayError) else type(error).__name__ if failed else ""
        )

"""The part of tracing that needs OpenTelemetry: spans, the headers between processes, and where spans are sent."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from agentspec.errors import ConfigurationError, needs_extra
from agentspec.telemetry.safe_errors import error_name
from agentspec.version import __version__

T = TypeVar("T")

PROVIDER = "agentspec"
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


def send_spans() -> None:
    """Send the spans of this process where the variables of the OpenTelemetry SDK say.

    Raises `ModuleNotFoundError` that names the missing extra, and `ConfigurationError` for another protocol than HTTP.
    """
    for name in _PROTOCOLS:
        if os.environ.get(name, "http/protobuf") != "http/protobuf":
            raise ConfigurationError(f"spans are sent by HTTP: unset {name}, or set it to http/protobuf")
    with needs_extra("otel"):
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": PROVIDER}
    provider = TracerProvider(resource=Resource.create({**named, "service.version": __version__}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)


class Span:
    """A span that is not ended yet; its parent is the current one, or that of a request's `headers`. Attributes that
    are None are left out.
    """

    def __init__(self, name: str, kind: str, headers: Mapping[str, str] | None, attributes: Mapping[str, Any]) -> None:
        from opentelemetry import propagate, trace

        parent = None if headers is None else propagate.extract(headers)
        tracer = trace.get_tracer(PROVIDER, __version__)
        self._span = tracer.start_span(name, parent, trace.SpanKind[kind.upper()])
        self.set(attributes)

    def set(self, attributes: Mapping[str, Any]) -> None:
        self._span.set_attributes({name: value for name, value in attributes.items() if value is not None})

    def rename(self, name: str) -> None:
        self._span.update_name(name)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Spans that begin inside are its children. The block may end in another context than it began in."""
        from opentelemetry import context, trace

        around = context.get_current()
        context.attach(trace.set_span_in_context(self._span))
        try:
            yield
        finally:
            context.attach(around)  # not detach(), which wants the context of the beginning

    @contextmanager
    def whole(self) -> Iterator[Span]:
        """Around the whole operation: the current span inside, ended behind it, with the error that was raised."""
        failed: str | None = None
        try:
            with self.current():
                yield self
        except Exception as error:
            failed = error_name(error)
            raise
        finally:
            self.end(failed)

    async def each(self, items: AsyncGenerator[T]) -> AsyncIterator[T]:
        """`items`, each computed inside this span, but not what the caller does with it."""
        while True:
            with self.current():
                try:
                    item = await anext(items)
                except StopAsyncIteration:
                    return
            yield item

    def end(self, error: str | None = None) -> None:
        """`error` is the class or code of what the operation failed with."""
        from opentelemetry.trace import StatusCode

        if error is not None:
            self._span.set_attribute("error.type", error)
            self._span.set_status(StatusCode.ERROR)
        self._span.end()


def trace_headers() -> dict[str, str]:
    """The headers that make the spans of a server children of the current span."""
    from opentelemetry.propagate import inject

    sent: dict[str, str] = {}
    inject(sent)
    return sent

"""Spans by OpenTelemetry's conventions for generative AI, of a process that has set a tracer provider.

In any other nothing is imported and nothing is done. Names: github.com/open-telemetry/semantic-conventions-genai; what
it has no name for is `agentspec.*`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentspec.telemetry.otel import Span

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_CONTENT = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
_CAPTURED = ("true", "span_only", "span_and_event")


def configure() -> None:
    """Send the spans of this process where `OTEL_EXPORTER_OTLP_ENDPOINT` says, if it does. Raises as `send_spans`."""
    off = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or os.environ.get("OTEL_TRACES_EXPORTER") == "none"
    if any(os.environ.get(name) for name in _ENDPOINTS) and not off and not traces():
        from agentspec.telemetry.otel import send_spans

        send_spans()


def traces() -> bool:
    """Whether something in this process has set a tracer provider."""
    trace = sys.modules.get("opentelemetry.trace")
    return trace is not None and not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


def captures_content() -> bool:
    """Whether spans may hold texts: the switch is that of all instrumentations."""
    return os.environ.get(_CONTENT, "").lower() in _CAPTURED


def start(
    operation: str,
    subject: str | None = None,
    attributes: Mapping[str, Any] | None = None,
    *,
    kind: str = "internal",
    headers: Mapping[str, str] | None = None,
) -> Span | None:
    """A span of a `gen_ai.operation.name` on its `subject`: a model, tool or agent. None where nothing is traced.

    Its parent is the current span, or the one that `headers` of a request name.
    """
    if not traces():
        return None
    from agentspec.telemetry.otel import Span

    named = {"gen_ai.operation.name": operation, **(attributes or {})}
    return Span(f"{operation} {subject}" if subject else operation, kind, headers, named)


def span(
    operation: str, subject: str | None = None, attributes: Mapping[str, Any] | None = None
) -> AbstractContextManager[Span | None]:
    """Around an operation: `start`, and the end. Raised errors are named in the span."""
    started = start(operation, subject, attributes)
    return nullcontext() if started is None else started.whole()


def within(span: Span | None) -> AbstractContextManager[None]:
    """A context in which spans are children of `span`, if there is one."""
    return nullcontext() if span is None else span.current()


def annotate(attributes: Callable[[], Mapping[str, Any]]) -> None:
    """Add attributes to the current span."""
    if traces():
        sys.modules["opentelemetry.trace"].get_current_span().set_attributes(attributes())


def trace_headers() -> dict[str, str]:
    """The headers that make the spans of a server children of the current span; empty where nothing is traced."""
    if not traces():
        return {}
    from agentspec.telemetry import otel

    return otel.trace_headers()

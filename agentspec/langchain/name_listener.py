"""Hears the names of tools in a model's answer while it streams."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.tracers.context import register_configure_hook

T = TypeVar("T")


class NameListener(BaseCallbackHandler):
    """Tells every name of a tool that a streamed answer calls, as soon as it has come."""

    run_inline = True

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell

    def on_chat_model_start(self, serialized: Any, messages: Any, **_: Any) -> None:
        """Nothing: LangChain would else write the messages out for `on_llm_start`."""

    def on_llm_new_token(self, token: Any, *, chunk: Any = None, **_: Any) -> None:
        self.hear(getattr(chunk, "message", None))

    def on_stream_event(self, event: Any, **_: Any) -> None:
        block = event.get("content") if event.get("event") == "content-block-start" else None
        if isinstance(block, dict) and block.get("type") in ("tool_call_chunk", "tool_call"):
            self._tell_name(block.get("name"))

    def hear(self, message: Any) -> None:
        """Hear a chunk of an answer."""
        for call in getattr(message, "tool_call_chunks", None) or ():
            self._tell_name(call.get("name"))

    def _tell_name(self, name: object) -> None:
        if name and isinstance(name, str):
            self._tell(name)


class StreamingNameListener(NameListener):
    """Makes models stream that it is given to: LangChain knows a handler that wants it by these methods."""

    def tap_output_iter(self, run_id: UUID, output: Iterator[T]) -> Iterator[T]:
        return output

    def tap_output_aiter(self, run_id: UUID, output: AsyncIterator[T]) -> AsyncIterator[T]:
        return output


_listener: ContextVar[NameListener | None] = ContextVar("agentspec_tool_names", default=None)
register_configure_hook(_listener, inheritable=False)


@contextmanager
def listening(tell: Callable[[str], None] | None, *, stream: bool = False) -> Iterator[None]:
    """Tell the names in the answers of models that are called inside; with `stream` those stream that can."""
    kind = StreamingNameListener if stream else NameListener
    handler = None if tell is None else kind(tell)
    token = _listener.set(handler)
    try:
        yield
    finally:
        _listener.reset(token)


def hear(run_manager: Any, message: Any) -> None:
    """Let those listen that hear names, of an answer that is not streamed to other callbacks."""
    for handler in getattr(run_manager, "handlers", ()):
        if isinstance(handler, NameListener):
            handler.hear(message)

"""How the chunks of a stream become events: the form of each API."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agentspec.protocol.responses import obfuscated
from agentspec.protocol.wire import DONE, encode, event, named_event
from agentspec.proxy.errors import anthropic_error_event, error_event


@dataclass(frozen=True, slots=True)
class Framing:
    """`named`: events have the chunk's `type` as their name. `error` makes the event of a failure, given the request's
    id; `end` is sent after everything.
    """

    named: bool = False
    error: Callable[[Exception, str], bytes] = error_event
    end: bytes = DONE

    def event(self, chunk: dict[str, Any], *, obfuscate: bool = False) -> bytes:
        """The event of one chunk, filled up to a common size if `obfuscate`."""
        data = obfuscated(chunk) if obfuscate else encode(chunk)
        return named_event(chunk["type"], data) if self.named else event(data)


CHUNKS = Framing()
"""OpenAI's chats and completions."""
MESSAGE_EVENTS = Framing(named=True, error=anthropic_error_event, end=b"")
"""Anthropic's messages."""

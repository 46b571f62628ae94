"""The base model alone, step by step: what every strategy falls back to, and what it is compared with."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from agentspec.reasoning.delegation.events import Event
from agentspec.reasoning.delegation.thinking import Thinking


async def base_only(thinking: Thinking) -> AsyncGenerator[Event]:
    """Step after step of the base model."""
    while thinking.over is None:
        async with aclosing(thinking.write("base")) as events:
            async for event in events:
                yield event

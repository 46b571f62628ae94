"""What a backend is: something that generates. Further abilities are separate one-method protocols."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from agentspec.types import Delta, GenerateRequest


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do beyond `generate`. A caller asks here instead of trying and failing."""

    token_ids: bool = False  # accepts and returns token ids
    continue_final: bool = False  # can continue an assistant message
    logprobs: bool = False
    speculation: bool = False  # drafts and verifies tokens itself
    context_length: int | None = None


@runtime_checkable
class Backend(Protocol):
    """Generates text. Safe to call from several tasks of one event loop at once."""

    @property
    def capabilities(self) -> Capabilities: ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        """Yield the answer piece by piece; the last delta carries `finish_reason` and `usage`.

        Closing the iterator cancels the work and frees its place at once. Raises `InvalidRequestError` before the
        first delta for what the backend cannot honour, and other `AgentSpecError`s for what goes wrong later.
        """
        ...

    async def aclose(self) -> None:
        """Cancel what runs and release every resource. Idempotent."""
        ...

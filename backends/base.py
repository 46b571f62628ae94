"""What a backend is: something that generates. Further abilities are separate one-method protocols."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

from agentspec.types import Delta, GenerateRequest, Message

NONE: Mapping[str, Any] = MappingProxyType({})


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


@runtime_checkable
class TextSide(Protocol):
    """A backend that shows what becomes of text before its model sees it. Prompts of token ids need `token_ids` too."""

    async def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        template_arguments: Mapping[str, Any] = NONE,
    ) -> str:
        """The prompt that `messages` become, ready for the assistant's answer. Raises `InvalidRequestError`.

        `tools` and `template_arguments` are a request's, as its chat template is shown them.
        """
        ...

    async def tokenize(self, text: str, *, begins: bool = False) -> list[int]:
        """Token ids of `text` as it continues a prompt; `begins` adds what the model wants at a prompt's beginning."""
        ...

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`; what ends an answer has none."""
        ...


def text_side(backend: Backend) -> TextSide | None:
    """The text side of a backend that takes prompts of token ids; an endpoint's is known once it was probed."""
    shown = getattr(backend, "text_side", backend)
    return shown if isinstance(shown, TextSide) and backend.capabilities.token_ids else None


@runtime_checkable
class Embeds(Protocol):
    """A backend that turns texts into vectors whose directions tell how alike they are."""

    async def embed(self, texts: Sequence[str], model: str) -> list[list[float]]:
        """One vector for each text, all of one length."""
        ...

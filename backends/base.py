"""The interface of a backend, which generates answers, and abilities that several kinds of backends have."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from agentspec.types import Delta, GenerateRequest, Message

if TYPE_CHECKING:
    from agentspec.backends.openai.isolation import TenantIsolation
    from agentspec.backends.torch import TorchBackend

CHAT, COMPLETIONS, EMBEDDINGS = "/chat/completions", "/completions", "/embeddings"
MESSAGES, COUNT_TOKENS = "/messages", "/messages/count_tokens"
RESPONSES, INPUT_TOKENS, COMPACT = "/responses", "/responses/input_tokens", "/responses/compact"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"  # next to /v1, as in vLLM
NONE: Mapping[str, Any] = MappingProxyType({})
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do beyond `generate`. Callers check here before they use an ability."""

    token_ids: bool = False  # accepts and returns token ids
    continue_final: bool = False  # can continue an assistant message
    logprobs: bool = False
    speculation: bool = False  # drafts and verifies tokens itself
    context_length: int | None = None
    routes: tuple[str, ...] = (CHAT, COMPLETIONS)  # paths below /v1 that a gateway may forward to it


@runtime_checkable
class Backend(Protocol):
    """Generates text. Safe to call from several tasks of one event loop at once."""

    @property
    def capabilities(self) -> Capabilities: ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        """Yield the answer piece by piece; the last delta carries `finish_reason` and `usage`.

        Closing the iterator cancels the request and frees its slot at once. Raises `InvalidRequestError` before the
        first delta for a request that the backend cannot honour, and other `AgentSpecError`s for later failures.
        """
        ...

    async def aclose(self) -> None:
        """Cancel running requests and release every resource. Idempotent."""
        ...


def closing_items(iterator: AsyncIterator[Any]) -> Any:
    """A context manager that closes `iterator` at its end if it has `aclose`, which not every async iterator has."""
    return aclosing(cast(Any, iterator)) if hasattr(iterator, "aclose") else AsyncExitStack()


@runtime_checkable
class Tokenization(Protocol):
    """A backend that exposes its chat template and tokenizer. Prompts of token ids need `token_ids` too."""

    async def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        template_arguments: Mapping[str, Any] = NONE,
    ) -> str:
        """The prompt that the chat template makes of `messages`, ready for the answer. Raises `InvalidRequestError`.

        The template is given the request's `tools` and `template_arguments`.
        """
        ...

    async def tokenize(self, text: str, *, begins: bool = False) -> list[int]:
        """Token ids of `text` as it continues a prompt; `begins` adds the model's tokens for the start of a prompt."""
        ...

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`; tokens that end an answer have no text."""
        ...


def tokenization_of(backend: Backend) -> Tokenization | None:
    """The backend's tokenization if it takes prompts of token ids, else None; an endpoint's is known after a probe."""
    shown = getattr(backend, "tokenization", backend)
    return shown if isinstance(shown, Tokenization) and backend.capabilities.token_ids else None


def is_local(backend: object, ability: str) -> TypeGuard[TorchBackend]:
    """Whether `backend` has the method `ability` of the local engine, which no endpoint has."""
    return hasattr(backend, ability)


@runtime_checkable
class SharesCaches(Protocol):
    """A backend whose server stores what it computed for one request and reuses it for later requests of any client."""

    def limit(self, max_tokens: int) -> None:
        """Ask for at most `max_tokens` tokens in one answer from now on."""
        ...

    def isolate(self, isolation: TenantIsolation) -> None:
        """Keep tenants apart from now on, as `isolation` says."""
        ...

    async def check_isolation(self) -> None:
        """Raises `ConfigurationError` if the server could not keep several tenants apart, and they may not share it."""
        ...

    async def leave_loop(self) -> None:
        """Close the connections of the running loop, which is about to end."""
        ...


@runtime_checkable
class AddsHeaders(Protocol):
    """A backend whose answers carry HTTP headers of its own."""

    def response_headers(self, request: GenerateRequest) -> dict[str, str]:
        """The headers of the answer to `request`, known before it begins."""
        ...

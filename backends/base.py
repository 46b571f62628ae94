"""The interface of a backend, which generates answers. Each further ability is a protocol of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from agentspec.telemetry.samples import BackendSample
from agentspec.types import DEFAULT_TENANT, Delta, GenerateRequest, Message

if TYPE_CHECKING:
    from agentspec.backends.openai.isolation import TenantIsolation
    from agentspec.errors import AgentSpecError

CHAT, COMPLETIONS, EMBEDDINGS = "/chat/completions", "/completions", "/embeddings"
MESSAGES, COUNT_TOKENS = "/messages", "/messages/count_tokens"
RESPONSES = "/responses"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"  # beside /v1, as in vLLM
NONE: Mapping[str, Any] = MappingProxyType({})
T = TypeVar("T")
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do beyond `generate`. Callers check here before they use an ability."""

    token_ids: bool = False  # accepts and returns token ids
    continue_final: bool = False  # can continue an assistant message
    logprobs: bool = False
    speculation: bool = False  # drafts and verifies tokens itself
    context_length: int | None = None
    routes: tuple[str, ...] = (CHAT, COMPLETIONS)  # paths below /v1 whose requests a gateway may send to it


@runtime_checkable
class Backend(Protocol):
    """Generates text. Safe to call from several tasks of one event loop at once."""

    @property
    def capabilities(self) -> Capabilities: ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        """Yield the answer piece by piece; the last delta carries `finish_reason` and `usage`.

        Closing the iterator cancels the request and frees its place at once. Raises `InvalidRequestError` before the
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


@runtime_checkable
class SpellsTokens(Protocol):
    """A backend whose tokens can be written out, the special ones included."""

    async def spell(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids` with special tokens by their names, such as the marks of a chat template."""
        ...


def tokenization_of(backend: Backend) -> Tokenization | None:
    """The backend's tokenization if it takes prompts of token ids, else None; an endpoint's is known after a probe."""
    shown = getattr(backend, "tokenization", backend)
    return shown if isinstance(shown, Tokenization) and backend.capabilities.token_ids else None


@runtime_checkable
class RecordsAnswers(Protocol):
    """A backend with a token cache that can be given an answer."""

    async def record(self, request: GenerateRequest, token_ids: Sequence[int]) -> None:
        """Keep `token_ids` as the answer to the prompt of token ids in `request`.

        For an answer of several requests with `share=False`. If the cache fails, that is logged.
        """
        ...


@runtime_checkable
class SharesCaches(Protocol):
    """A backend whose server keeps what it computed for one request, for the next ones of anybody, and others share."""

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


@runtime_checkable
class ReportsHealth(Protocol):
    """A backend that computes in this process and can fail for good."""

    @property
    def failure(self) -> AgentSpecError | None:
        """The error with which every further request is refused, once only a new process can help; None before."""
        ...


@runtime_checkable
class ReportsMetrics(Protocol):
    """A backend that reports counts for metrics."""

    async def metrics(self, name: str) -> BackendSample | None:
        """The counts of this backend, whose name is `name`; None if there are none now. Never raises; takes seconds at
        most.
        """
        ...


@runtime_checkable
class Embeds(Protocol):
    """A backend that turns texts into vectors whose directions tell how similar the texts are."""

    async def embed(self, texts: Sequence[str], model: str, tenant: str = DEFAULT_TENANT) -> list[list[float]]:
        """One vector for each text, all of the same length. The texts are the tenant's."""
        ...


@runtime_checkable
class EmbedsCounted(Embeds, Protocol):
    """A backend that embeds in this process, and so knows how long texts and vectors are."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def dimensions(self) -> int:
        """How many numbers a vector has."""
        ...

    async def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """How many tokens each text has; at most `capabilities.context_length` of them are read."""
        ...


@runtime_checkable
class HiddenStates(Protocol):
    """A backend that returns the hidden states of texts: those after the last norm, which the output head reads."""

    @property
    def fingerprint(self) -> str:
        """Identifies the weights; hidden states of models with different fingerprints are not comparable."""
        ...

    async def hidden_states(self, texts: Sequence[Sequence[int]]) -> list[Floats]:
        """The hidden states [tokens, width] of each text of token ids: one state after every token."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput:
    """A forward's result after a text's last token: `logits` [vocab], and `hidden` [width], the output head's input."""

    logits: Floats
    hidden: Floats


class StepwiseDecoding(Protocol):
    """One answer, decoded token by token by a caller that chooses the scores from which each token is drawn.

    `tokens` are the prompt and the tokens added so far. Only for use inside `StepSession.run`.
    """

    @property
    def tokens(self) -> Sequence[int]: ...

    @property
    def plain(self) -> bool:
        """Whether `draw` simply returns the token with the best score, of equals the lowest id."""
        ...

    def advance(self) -> StepOutput:
        """Run the model over the last token, and over the tokens before it that were not computed yet.

        Each added token has a forward of its own, so that the result does not depend on tokens rewound before.
        """
        ...

    def draw(self, scores: Floats) -> int:
        """Draw the next token by the request's sampling, with `scores` [vocab] as logits. Does not add the token.

        The result depends on scores, tokens, seed and position alone.
        """
        ...

    def add(self, token: int) -> bool:
        """Add a token; returns True if the answer must end with it, because of an end token or the length limit."""
        ...

    def rewind(self, length: int) -> None:
        """Drop all but the first `length` tokens, at least the prompt. Tokens added again are not computed again."""
        ...


class Scan(Protocol):
    """A nearest-neighbour search over a fixed set of rows. Only for use inside `StepSession.run`."""

    def near(self, queries: Floats, count: int) -> list[NDArray[np.int64]]:
        """For each of `queries` [q, width], candidates for its `count` nearest rows by Euclidean distance, as ascending
        row numbers: all of the nearest rows, and few others.
        """
        ...


class StepSession(Protocol):
    """An answer that a caller makes step by step, in the thread where the model computes."""

    async def run(self, function: Callable[[StepwiseDecoding], T]) -> T:
        """Run `function` in the model's computing thread, between other requests' steps; returns its result."""
        ...

    def tell(self, tokens: Sequence[int]) -> Delta:
        """The delta that a client gets for the next `tokens`; `finish_reason` is set when the answer ends, and tokens
        after the end are left out.
        """
        ...


@runtime_checkable
class StepByStep(Protocol):
    """A backend that lets a caller choose each token's scores, for example from stored rows near its hidden state."""

    async def open_steps(self, request: GenerateRequest) -> StepSession:
        """Begin an answer. Raises `InvalidRequestError` as `generate` does, and for several choices or logprobs."""
        ...

    async def open_scan(self, rows: NDArray[np.float16]) -> Scan:
        """Make `rows` [n, width] ready to be searched where the model computes."""
        ...

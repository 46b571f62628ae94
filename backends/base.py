"""What a backend is: something that generates. Further abilities are separate one-method protocols."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from agentspec.telemetry.samples import BackendSample
from agentspec.types import Delta, GenerateRequest, Labels, Message

if TYPE_CHECKING:
    from agentspec.backends.http import UpstreamResponse

CHAT, COMPLETIONS, EMBEDDINGS = "/chat/completions", "/completions", "/embeddings"
NONE: Mapping[str, Any] = MappingProxyType({})
T = TypeVar("T")
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do beyond `generate`. A caller asks here instead of trying and failing."""

    token_ids: bool = False  # accepts and returns token ids
    continue_final: bool = False  # can continue an assistant message
    logprobs: bool = False
    speculation: bool = False  # drafts and verifies tokens itself
    context_length: int | None = None
    routes: tuple[str, ...] = (CHAT, COMPLETIONS)  # of a gateway, below /v1, whose requests it answers


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


def closing_items(iterator: AsyncIterator[Any]) -> Any:
    """Close `iterator` on the way out if it can be closed; a backend may return any asynchronous iterator."""
    return aclosing(cast(Any, iterator)) if hasattr(iterator, "aclose") else AsyncExitStack()


@runtime_checkable
class Tokenization(Protocol):
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


def tokenization_of(backend: Backend) -> Tokenization | None:
    """The tokenization of a backend that takes prompts of token ids; an endpoint's is known once it was probed."""
    shown = getattr(backend, "tokenization", backend)
    return shown if isinstance(shown, Tokenization) and backend.capabilities.token_ids else None


@runtime_checkable
class Forwards(Protocol):
    """A backend whose server speaks OpenAI's protocol itself: a gateway passes bytes on, both ways, unchanged."""

    def forward(
        self, method: str, path: str, *, headers: Mapping[str, str], body: bytes = b"", query: str = ""
    ) -> AbstractAsyncContextManager[UpstreamResponse]:
        """Send a request to `path` below the server's root; the caller allow-lists paths.

        Error answers are answers here. Closing the block cancels the server's work. Raises `UpstreamError`.
        """
        ...

    async def label_fields(self, labels: Labels, given: Mapping[str, Any]) -> dict[str, Any]:
        """What to set in a body, which has the fields `given`, for the server to know `labels`. Never raises."""
        ...

    async def models(self, headers: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
        """The server's own model list; `headers` may carry a client's key. Raises `UpstreamError`."""
        ...


@runtime_checkable
class AddsHeaders(Protocol):
    """A backend whose answers carry HTTP headers of its own."""

    def response_headers(self, request: GenerateRequest) -> dict[str, str]:
        """The headers of the answer to `request`, known before it begins."""
        ...


@runtime_checkable
class ReportsMetrics(Protocol):
    """A backend that counts what it does."""

    async def metrics(self, name: str) -> BackendSample | None:
        """The counts of this backend, called `name`; None where it has none now. Raises nothing, in a few seconds."""
        ...


@runtime_checkable
class Embeds(Protocol):
    """A backend that turns texts into vectors whose directions tell how alike they are."""

    async def embed(self, texts: Sequence[str], model: str) -> list[list[float]]:
        """One vector for each text, all of one length."""
        ...


@runtime_checkable
class HiddenStates(Protocol):
    """A backend that shows the hidden states of texts: those after the last norm, which the output head reads."""

    @property
    def fingerprint(self) -> str:
        """Names the weights; states of models with other fingerprints have nothing to do with each other."""
        ...

    async def hidden_states(self, texts: Sequence[Sequence[int]]) -> list[Floats]:
        """For each text of token ids its hidden states [tokens, width], one behind every token."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput:
    """What a model computed behind a text's last token: `logits` [vocab], and the `hidden` [width] its head read."""

    logits: Floats
    hidden: Floats


class StepwiseDecoding(Protocol):
    """One answer, token by token, in the hands of who decides what the next token is drawn from.

    `tokens` are the prompt and what was added. Only for use inside `StepSession.run`.
    """

    @property
    def tokens(self) -> Sequence[int]: ...

    @property
    def plain(self) -> bool:
        """Whether the next token is simply the one with the best score, the lowest id among equals."""
        ...

    def advance(self) -> StepOutput:
        """Compute the last token, and the prompt before it where that has not been done.

        Each token has a forward of its own, so that what it gives does not depend on what was rewound before.
        """
        ...

    def draw(self, scores: Floats) -> int:
        """The next token by the request's sampling, with `scores` [vocab] in the place of logits; adds nothing.

        Depends on scores, tokens, seed and position alone.
        """
        ...

    def add(self, token: int) -> bool:
        """Add a token; True if an answer may not go on behind it, by its end tokens or its length."""
        ...

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` tokens, the prompt at least. What is added again is not computed again."""
        ...


class Scan(Protocol):
    """Many rows that are searched through as a whole. Only for use inside `StepSession.run`."""

    def near(self, queries: Floats, count: int) -> list[NDArray[np.int64]]:
        """For each of `queries` [q, width] the rows, ascending, that may be among its `count` nearest ones by Euclidean
        distance: all that are, and few others.
        """
        ...


class StepSession(Protocol):
    """An answer made step by step, where the model computes."""

    async def run(self, function: Callable[[StepwiseDecoding], T]) -> T:
        """Run `function` in the model's computing thread, between the work of other requests; returns what it does."""
        ...

    def tell(self, tokens: Sequence[int]) -> Delta:
        """The next `tokens` of the answer as a client sees them; `finish_reason` is set with the last, and what comes
        behind it is left out.
        """
        ...


@runtime_checkable
class StepByStep(Protocol):
    """A backend that lets somebody else decide what each token is drawn from, by rows near its hidden state, say."""

    async def open_steps(self, request: GenerateRequest) -> StepSession:
        """Begin an answer. Raises `InvalidRequestError` as `generate` does, and for what goes beyond one answer."""
        ...

    async def open_scan(self, rows: NDArray[np.float16]) -> Scan:
        """Make `rows` [n, width] ready to be searched where the model computes."""
        ...

"""KNN-LM behind the `Backend` protocol: a local model, a datastore of its states, and answers from both."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from agentspec.backends.base import Backend, Capabilities, HiddenStates, StepByStep
from agentspec.errors import ConfigurationError, NotReadyError
from agentspec.reasoning.retrieval.knn.generate import KnnDecoder, knn_lm
from agentspec.reasoning.retrieval.knn.mixture import Mixture
from agentspec.reasoning.retrieval.knn.search import DatastoreSearch, NeighbourCache
from agentspec.reasoning.retrieval.knn.settings import KnnSettings
from agentspec.reasoning.retrieval.knn.store import Datastore
from agentspec.reasoning.retrieval.knn.stride import KnnStride
from agentspec.types import Delta, GenerateRequest

if TYPE_CHECKING:
    from agentspec.reasoning.settings import KnnLmSettings


@runtime_checkable
class LocalModel(Backend, HiddenStates, StepByStep, Protocol):
    """What KNN-LM needs of a model: it runs here, shows its hidden states and is made to go step by step."""


class KnnBackend:
    """Answers of `base` mixed with a datastore. The base stays its owner's to close.

    `request.speculation` is whether neighbours are guessed; the answer is the same either way.
    """

    def __init__(self, base: LocalModel, datastore: DatastoreSearch, knobs: KnnSettings) -> None:
        self.knobs = knobs
        self._base, self._datastore = base, datastore
        self._mixture = Mixture(knobs.weight, knobs.temperature)

    @classmethod
    async def open(cls, base: Backend, folder: Path, knobs: KnnSettings, *, model: str) -> KnnBackend:
        """Read a datastore to where the model computes: 4 bytes a number. Raises `ConfigurationError` for a base that
        is no local model, and for a folder without a complete datastore of that model.
        """
        if not isinstance(base, LocalModel):
            raise ConfigurationError(f'KNN-LM needs a local model: {model!r} is no backend of kind "torch"')
        store = Datastore.open(folder, fingerprint=base.fingerprint, model=model)
        return cls(base, DatastoreSearch(store, await base.open_scan(store.keys)), knobs)

    def with_knobs(self, knobs: KnnSettings) -> KnnBackend:
        """The same model and datastore with other knobs."""
        return KnnBackend(self._base, self._datastore, knobs)

    @property
    def entries(self) -> int:
        """Of the datastore."""
        return self._datastore.store.manifest.entries

    @property
    def capabilities(self) -> Capabilities:
        own = self._base.capabilities
        return Capabilities(
            token_ids=own.token_ids,
            continue_final=own.continue_final,
            speculation=True,
            context_length=own.context_length,
        )

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        """The answer as it becomes certain; closing the iterator cancels the work.

        Raises `InvalidRequestError` as the base does, and for several choices and log-probabilities.
        """
        session = await self._base.open_steps(request)
        async with aclosing(knn_lm(session, self._player(speculation=request.speculation))) as deltas:
            async for delta in deltas:
                yield delta

    async def aclose(self) -> None:
        """The base is closed by who built it."""

    def _player(self, *, speculation: bool) -> KnnDecoder:
        knobs, store = self.knobs, self._datastore.store
        return KnnDecoder(
            self._datastore,
            self._mixture,
            knobs.neighbours,
            NeighbourCache(store, knobs.prefetch) if speculation else None,
            KnnStride(None if knobs.stride == "os3" else knobs.stride),
            bound=knobs.bound,
        )


@dataclass(slots=True)
class KnnStrategy:
    """`[models.name] strategy = "knnlm"`: a `KnnBackend` that is there once `open` has read its datastore."""

    name: str
    settings: KnnLmSettings
    base: Backend
    model: str
    _opened: KnnBackend | None = None

    async def open(self) -> None:
        """Raises `ConfigurationError` as `KnnBackend.open` does, naming the table."""
        try:
            self._opened = await KnnBackend.open(self.base, self.settings.datastore, self.settings, model=self.model)
        except ConfigurationError as error:
            raise ConfigurationError(f"models.{self.name}: {error}") from error

    @property
    def capabilities(self) -> Capabilities:
        return self._ready.capabilities

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        """As `KnnBackend.generate`."""
        return self._ready.generate(request)

    async def aclose(self) -> None:
        """The base is closed by who built it."""

    @property
    def _ready(self) -> KnnBackend:
        if self._opened is None:
            raise NotReadyError(f"the datastore of {self.name!r} is not open yet")
        return self._opened

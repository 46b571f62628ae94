"""KNN-LM as a `Backend`: answers from a local model and a datastore of its hidden states."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from agentspec.backends.base import Backend, Capabilities, is_local
from agentspec.errors import ConfigurationError, NotReadyError
from agentspec.reasoning.retrieval.knn.datastore import Datastore
from agentspec.reasoning.retrieval.knn.decoder import KnnDecoder, KnnStride, Mixture
from agentspec.reasoning.retrieval.knn.search import DatastoreSearch, NeighbourCache
from agentspec.reasoning.settings import KnnLmSettings, KnnSettings
from agentspec.reasoning.strategy import Dependencies, ModelRef, Strategy
from agentspec.types import Delta, GenerateRequest

if TYPE_CHECKING:
    from agentspec.backends.torch import TorchBackend


class KnnBackend:
    """Answers with the distribution of `base`, mixed with a datastore's. The owner of `base` closes it.

    `request.speculation` says whether to guess neighbours; the answer is the same either way.
    """

    def __init__(self, base: TorchBackend, datastore: DatastoreSearch, settings: KnnSettings) -> None:
        self.settings = settings
        self._base, self._datastore = base, datastore
        self._mixture = Mixture(settings.weight, settings.temperature)

    @classmethod
    async def open(cls, base: Backend, folder: Path, settings: KnnSettings, *, model: str) -> KnnBackend:
        """Load a datastore onto the model's device, at 4 bytes a number. Raises `ConfigurationError` if `base` is no
        local model, and for a folder without a complete datastore of that model.
        """
        if not is_local(base, "open_steps"):
            raise ConfigurationError(f'KNN-LM needs a local model: {model!r} is no backend of kind "torch"')
        store = Datastore.open(folder, fingerprint=base.fingerprint, model=model)
        return cls(base, DatastoreSearch(store, await base.open_scan(store.keys)), settings)

    def with_settings(self, settings: KnnSettings) -> KnnBackend:
        """The same model and datastore with other settings."""
        return KnnBackend(self._base, self._datastore, settings)

    @property
    def entries(self) -> int:
        """The number of entries in the datastore."""
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
        """Yield verified tokens; closing the iterator cancels the work.

        Raises `InvalidRequestError` as the base does, and for several choices or log-probabilities.
        """
        session = await self._base.open_steps(request)
        decoder = self._decoder(speculation=request.speculation)
        delta = Delta()
        while delta.finish_reason is None:
            if tokens := await session.run(decoder.advance):
                delta = session.tell(tokens)
                if delta.finish_reason is not None:
                    delta = replace(delta, speculation=decoder.counters.summary())
                yield delta

    async def aclose(self) -> None:
        """Does nothing: whoever built the base closes it."""

    def _decoder(self, *, speculation: bool) -> KnnDecoder:
        settings, store = self.settings, self._datastore.store
        return KnnDecoder(
            self._datastore,
            self._mixture,
            settings.neighbours,
            NeighbourCache(store, settings.prefetch) if speculation else None,
            KnnStride(None if settings.stride == "os3" else settings.stride),
            bound=settings.bound,
        )


@dataclass(slots=True)
class KnnStrategy(Strategy[KnnLmSettings]):
    """`[models.name] strategy = "knnlm"`: a `KnnBackend` that can answer after `prepare` has loaded its datastore."""

    name: str
    settings: KnnLmSettings
    base: ModelRef
    _opened: KnnBackend | None = None

    @classmethod
    def open(cls, name: str, settings: KnnLmSettings, dependencies: Dependencies) -> KnnStrategy:
        return cls(name, settings, dependencies.find(settings.base))

    @property
    def roles(self) -> dict[str, ModelRef]:
        return {"base": self.base}

    async def prepare(self) -> list[str]:
        """Raises `ConfigurationError` as `KnnBackend.open` does, naming the table."""
        try:
            self._opened = await KnnBackend.open(
                self.base.backend, self.settings.datastore, self.settings, model=self.base.model
            )
        except ConfigurationError as error:
            raise ConfigurationError(f"models.{self.name}: {error}") from error
        return []

    @property
    def capabilities(self) -> Capabilities:
        return self._ready.capabilities

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        """As `KnnBackend.generate`."""
        return self._ready.generate(request)

    @property
    def _ready(self) -> KnnBackend:
        if self._opened is None:
            raise NotReadyError(f"the datastore of {self.name!r} is not open yet")
        return self._opened

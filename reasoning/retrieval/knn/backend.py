"""KNN-LM as a `Backend`: mixes a local model's next-token distribution with the tokens after similar hidden states."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from agentspec.backends.base import Capabilities, is_local
from agentspec.errors import ConfigurationError, NotReadyError
from agentspec.reasoning.retrieval.knn.datastore import Datastore
from agentspec.reasoning.retrieval.knn.decoder import DatastoreSearch, KnnDecoder, Mixture, NeighbourCache
from agentspec.reasoning.settings import KnnLmSettings
from agentspec.reasoning.strategy import Dependencies, ModelRef, Strategy
from agentspec.types import Delta, GenerateRequest

if TYPE_CHECKING:
    from agentspec.backends.torch import TorchBackend


@dataclass(slots=True)
class KnnBackend(Strategy[KnnLmSettings]):
    """Answers with the distribution of `base`, mixed with a datastore's, once `prepare` has loaded the datastore. The
    owner of `base` closes it.

    `request.speculation` says whether to guess neighbours; the answer is the same either way.
    """

    name: str
    settings: KnnLmSettings
    base: ModelRef
    _model: TorchBackend | None = None
    _datastore: DatastoreSearch | None = None

    @classmethod
    def open(cls, name: str, settings: KnnLmSettings, dependencies: Dependencies) -> KnnBackend:
        return cls(name, settings, dependencies.find(settings.base))

    @property
    def roles(self) -> dict[str, ModelRef]:
        return {"base": self.base}

    async def prepare(self) -> list[str]:
        """Load the datastore onto the model's device, at 4 bytes a number. Raises `ConfigurationError` if the base is
        no local model, and for a folder without a complete datastore of that model.
        """
        model = self.base.backend
        if not is_local(model, "open_steps"):
            named = f"models.{self.name}: KNN-LM needs a local model: {self.base.model!r}"
            raise ConfigurationError(f'{named} is no backend of kind "torch"')
        try:
            store = Datastore.open(self.settings.datastore, fingerprint=model.fingerprint, model=self.base.model)
        except ConfigurationError as error:
            raise ConfigurationError(f"models.{self.name}: {error}") from error
        self._model, self._datastore = model, DatastoreSearch(store, await model.open_scan(store.keys))
        return []

    @property
    def capabilities(self) -> Capabilities:
        own = self.base.backend.capabilities
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
        if self._model is None or self._datastore is None:
            raise NotReadyError(f"the datastore of {self.name!r} is not open yet")
        session = await self._model.open_steps(request)
        mixture = Mixture(self.settings.weight, self.settings.temperature)
        cache = NeighbourCache(self._datastore.store) if request.speculation else None
        decoder = KnnDecoder(self._datastore, mixture, self.settings.neighbours, cache)
        delta = Delta()
        while delta.finish_reason is None:
            if tokens := await session.run(decoder.advance):
                delta = session.tell(tokens)
                if delta.finish_reason is not None:
                    delta = replace(delta, speculation=decoder.counters.summary())
                yield delta

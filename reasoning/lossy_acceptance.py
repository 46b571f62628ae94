"""A local model whose draft model's tokens are accepted by a lossy rule, for the tenants that the settings name."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace

from agentspec.backends.base import Capabilities, closing_items, is_local
from agentspec.errors import ConfigurationError
from agentspec.protocol.forms import FORM_FIELDS
from agentspec.reasoning.settings import LossyAcceptanceSettings
from agentspec.reasoning.strategy import Dependencies, ModelRef, Strategy
from agentspec.types import Delta, GenerateRequest


@dataclass
class LossyAcceptanceBackend(Strategy[LossyAcceptanceSettings]):
    """Answers with `base`, lossily where the settings allow it: other tenants, answers that have to have a form or may
    call tools, greedy ones, and requests without speculation get the exact answer.
    """

    name: str
    settings: LossyAcceptanceSettings
    base: ModelRef

    @classmethod
    def open(cls, name: str, settings: LossyAcceptanceSettings, dependencies: Dependencies) -> LossyAcceptanceBackend:
        """Open the strategy. Raises `ConfigurationError` if `base` has no draft model of its own."""
        base = dependencies.find(settings.base)
        if not is_local(base.backend, "settings"):
            raise ConfigurationError(f"models.{name}.base must be a local model (kind = torch), not {settings.base!r}")
        try:
            base.backend.settings.require_draft_model()
        except ConfigurationError as error:
            raise ConfigurationError(f"models.{name}: {error.message}") from error
        return cls(name, settings, base)

    @property
    def capabilities(self) -> Capabilities:
        return self.base.backend.capabilities

    def response_headers(self, request: GenerateRequest) -> dict[str, str]:
        return super().response_headers(request) if self.is_lossy(request) else {}

    def is_lossy(self, request: GenerateRequest) -> bool:
        """Whether the answer to `request` may differ from the model's own."""
        formed = request.sampling.structured_outputs is not None or not request.extra.keys().isdisjoint(FORM_FIELDS)
        calls = bool(request.tools) and request.tool_choice != "none"
        exact = formed or calls or request.sampling.greedy
        return request.speculation and self.settings.admits(request.tenant) and not exact

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        """Yield the answer of the base model. Raises what it raises."""
        rule = self.settings.acceptance if self.is_lossy(request) else None
        asked = replace(request, model=self.base.model, acceptance=rule)
        async with closing_items(self.base.backend.generate(asked)) as deltas:
            async for delta in deltas:
                yield delta

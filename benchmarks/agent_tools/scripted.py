"""The local engine with a scripted policy: it computes and draws every token, but only the script's next is allowed.

Drafters know nothing of the script, other than a grammar's, which would draft what it forces. So a draft is accepted
exactly where it foresees the script, as it is with a model that would say the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentspec.backends.torch import TorchBackend
from agentspec.backends.torch.engine.request import EngineRequest
from agentspec.backends.torch.sampling.constraints import Constraints, ConstraintSpec
from agentspec.backends.torch.text.output_parser import OutputParserSpec
from agentspec.types import GenerateRequest


class ScriptedConstraints(Constraints):
    """Allows the script's next token alone, until it ends."""

    def __init__(self, script: Sequence[int]) -> None:
        super().__init__()
        self._script = script

    @property
    def idle(self) -> bool:
        return self._count >= len(self._script)

    @property
    def _forced(self) -> int | None:
        return None if self.idle else self._script[self._count]


@dataclass(frozen=True, slots=True)
class ScriptedSpec(ConstraintSpec):
    """The constraints of an answer that follows a script."""

    script: tuple[int, ...] = ()

    def start(self, min_tokens: int, end_ids: Collection[int], vocab_size: int) -> Constraints:
        return ScriptedConstraints(self.script)


class ScriptedBackend(TorchBackend):
    """Says what `script` holds, then ends the answer. For one request at a time."""

    script: tuple[int, ...] = ()

    def says(self, text: str) -> int:
        """Make `text` the next answers; returns how many tokens they take, with the one that ends them."""
        self.script = (*self._tokenizer.encode(text), min(self._stop_ids))
        return len(self.script)

    def prepare_all(self, request: GenerateRequest, **options: Any) -> tuple[list[EngineRequest], OutputParserSpec]:
        """As `TorchBackend.prepare_all`, held to the script."""
        choices, parser = super().prepare_all(request, **options)
        return [replace(one, constraints=ScriptedSpec(script=self.script)) for one in choices], parser

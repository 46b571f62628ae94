"""Which abilities the backends offer to the gateway, which asks for nothing else."""

from __future__ import annotations

import pytest

from agentspec.backends.base import CHAT, COMPLETIONS, AddsHeaders, Capabilities
from agentspec.backends.openai import OpenAIBackend
from agentspec.backends.torch import TorchBackend
from agentspec.reasoning.delegation.backend import DelegationBackend
from agentspec.reasoning.retrieval.backend import RetrievalBackend
from agentspec.reasoning.retrieval.knn_lm import KnnBackend
from agentspec.testing import FakeBackend

ABILITIES = {
    FakeBackend: set(),
    OpenAIBackend: set(),
    TorchBackend: set(),
    DelegationBackend: {AddsHeaders},
    RetrievalBackend: {AddsHeaders},
    KnnBackend: {AddsHeaders},
}


@pytest.mark.parametrize("backend", ABILITIES, ids=lambda backend: backend.__name__)
def test_what_a_backend_offers(backend: type) -> None:
    def offers(ability: type) -> bool:
        methods = [name for name, value in vars(ability).items() if callable(value) and not name.startswith("_")]
        return all(hasattr(backend, name) for name in methods)

    assert {one for one in (AddsHeaders,) if offers(one)} == ABILITIES[backend]


def test_a_backend_answers_both_routes_for_text_unless_it_says_otherwise() -> None:
    assert Capabilities().routes == (CHAT, COMPLETIONS)

from __future__ import annotations

import importlib
from inspect import iscoroutinefunction
from pathlib import Path

import pytest

from agentspec.reasoning.settings import (
    STRATEGIES,
    DelegationSettings,
    KnnLmSettings,
    LookaheadSettings,
    SpeculativeThinkingSettings,
    StrategySettings,
)
from agentspec.reasoning.strategy import Strategy

MODELS = {"base": "large", "small": "fast"}


@pytest.mark.parametrize("settings", STRATEGIES.values(), ids=STRATEGIES)
def test_every_listed_strategy_is_there(settings: type[StrategySettings]) -> None:
    module, _, kind = settings.implementation.partition(":")
    assert issubclass(getattr(importlib.import_module(module), kind), Strategy)
    if issubclass(settings, DelegationSettings):
        module, _, function = settings.algorithm.partition(":")
        assert iscoroutinefunction(getattr(importlib.import_module(module), function))


def test_answers_name_the_settings_that_change_them() -> None:
    thinking = SpeculativeThinkingSettings(**MODELS)
    assert thinking.summary == "speculative_thinking; small_reasons=true"
    assert LookaheadSettings(**MODELS).answer_settings == {"depth": 4}


def test_a_tilde_is_the_users_folder() -> None:
    home = Path.home()
    assert KnnLmSettings(base="local", datastore=Path("~/store")).datastore == home / "store"

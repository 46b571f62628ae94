from __future__ import annotations

import importlib
from contextlib import nullcontext
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from agentspec.reasoning.settings import (
    STRATEGIES,
    DelegationSettings,
    KnnLmSettings,
    LookaheadSettings,
    LossyAcceptanceSettings,
    SpeculativeThinkingSettings,
    StrategySettings,
)
from agentspec.reasoning.strategy import Strategy

MODELS = {"base": "large", "small": "fast"}


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"judge": "j", "compare": "equal"}, 'judge concerns compare = "judge"'),
        ({"judge": "j", "compare": "judge"}, None),
    ],
)
def test_settings_that_would_be_ignored_are_refused(given: dict[str, Any], error: str | None) -> None:
    with pytest.raises(ValidationError, match=error) if error else nullcontext():
        LookaheadSettings.model_validate({**MODELS, **given})


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
    assert LookaheadSettings(**MODELS).answer_settings == {"compare": "judge", "depth": 4}


def test_a_tilde_is_the_users_folder() -> None:
    home = Path.home()
    assert KnnLmSettings(base="local", datastore=Path("~/store")).datastore == home / "store"
    given = {"base": "local", "tenants": ["*"], "judge_head": "~/judge.safetensors"}
    assert LossyAcceptanceSettings.model_validate(given).acceptance.judge_head == str(home / "judge.safetensors")

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from agentspec.reasoning.settings import (
    DelegationSettings,
    KnnLmSettings,
    KnnSettings,
    LookaheadSettings,
    LossyAcceptanceSettings,
    RetrievalSettings,
    SpecReasonSettings,
    SpeculativeThinkingSettings,
)

MODELS = {"base": "large", "small": "fast"}


@pytest.mark.parametrize(
    ("kind", "given", "error"),
    [
        (SpecReasonSettings, {"judge_template": "plain"}, "set judge, or base_template"),
        (LookaheadSettings, {"judge_template": "plain"}, "set judge, or base_template"),
        (LookaheadSettings, {"judge": "j", "compare": "equal"}, 'judge concerns compare = "judge" and "embedding"'),
        (
            LookaheadSettings,
            {"judge": "j", "judge_template": "plain", "compare": "embedding"},
            "judge_template concerns",
        ),
        (LookaheadSettings, {"similarity": 0.9}, "similarity concerns"),
        *((kind, {"answer_marks": [""]}, "at least 1 character") for kind in (SpecReasonSettings, LookaheadSettings)),
    ],
)
def test_settings_that_would_be_ignored_are_refused(
    kind: type[DelegationSettings], given: dict[str, Any], error: str
) -> None:
    with pytest.raises(ValidationError, match=error):
        kind.model_validate({**MODELS, **given})


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (SpecReasonSettings, {"judge": "j", "judge_template": "plain"}),
        (LookaheadSettings, {"judge": "j", "judge_template": "plain"}),
        (LookaheadSettings, {"judge": "j", "compare": "embedding", "similarity": 0.9}),
        (LookaheadSettings, {"compare": "equal", "similarity": 0.95}),  # as the defaults are
    ],
)
def test_those_that_count_and_written_out_defaults_are_taken(
    kind: type[DelegationSettings], given: dict[str, Any]
) -> None:
    kind.model_validate({**MODELS, **given})


def test_answers_name_the_settings_that_change_them() -> None:
    thinking = SpeculativeThinkingSettings(**MODELS, choose_large=False)
    assert thinking.summary == "speculative_thinking; rule=published; small_reasons=true; choose_large=false"
    assert LookaheadSettings(**MODELS).answer_settings == {"rule": "published", "compare": "judge", "depth": 4}
    assert LookaheadSettings(**MODELS, compare="embedding").answer_settings["similarity"] == 0.95


@pytest.mark.parametrize(("kind", "least"), [(RetrievalSettings, 0), (KnnSettings, 1)])
def test_a_stride_is_a_number_of_guesses(kind: type[RetrievalSettings | KnnSettings], least: int) -> None:
    assert kind(stride=least).stride == least
    with pytest.raises(ValidationError, match="greater than or equal"):
        kind(stride=least - 1)


def test_a_tilde_is_the_users_folder() -> None:
    home = Path.home()
    assert KnnLmSettings(base="local", datastore=Path("~/store")).datastore == home / "store"
    given = {"base": "local", "tenants": ["*"], "rule": "judge", "judge_head": "~/judge.safetensors"}
    assert LossyAcceptanceSettings.model_validate(given).acceptance.judge_head == str(home / "judge.safetensors")

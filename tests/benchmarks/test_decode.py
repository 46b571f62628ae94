from __future__ import annotations

import pytest

from agentspec.backends.settings import TorchSettings
from agentspec.benchmarks.decode import CONTROL_DISTINCT, Run, Table, _require_distinct, other_drafters
from agentspec.benchmarks.stats import rotated


def test_the_order_rotates_so_that_none_is_always_first() -> None:
    variants = {name: (lambda prompt, index: Run((), 1.0)) for name in "abc"}
    orders = ["".join(name for name, _ in rotated(variants, index)) for index in range(4)]
    assert orders == ["abc", "bca", "cab", "abc"]


def test_a_control_that_repeats_is_refused() -> None:
    varied, repeated = Run(tuple(range(50)), 1.0), Run((1, 2) * 25, 1.0)
    _require_distinct([varied, varied])
    with pytest.raises(ValueError, match=f"need {CONTROL_DISTINCT}"):
        _require_distinct([varied, repeated])


def test_total_speed_weighs_by_time() -> None:
    table = Table("t")
    table.add("v", Run((0,) * 10, 1.0))
    table.add("v", Run((0,) * 10, 4.0))
    assert table.total_speed("v") == 4.0
    assert table.speeds("v") == [10.0, 2.5]
    assert table.tokens_per_step("v") is None


def test_turns_at_one_prompt_are_one_measurement() -> None:
    table = Table("t", turns=2)
    for seconds in (1.0, 3.0, 2.0, 2.0):
        table.add("v", Run((0,) * 10, seconds))
    assert table.speeds("v") == [5.0, 5.0]


def test_other_drafters_are_measured_alone_and_on_request() -> None:
    assert other_drafters(ngram=False, draft_model=None) == {}
    found = other_drafters(ngram=True, draft_model="small")
    named = {name: TorchSettings(**update).drafter_names(cache=True) for name, update in found.items()}
    assert named == {"on, ngram alone": ("ngram",), "on, small alone": ("model",)}


@pytest.mark.slow
@pytest.mark.model
def test_all_variants_answer_alike_on_the_default_model() -> None:
    """Two short prompts through every variant but the long warm-up: same tokens, fewer steps on the second pass."""
    from agentspec.benchmarks.decode import COLD, OFF, SECOND, TRANSFORMERS, Bench, second_tenant
    from agentspec.benchmarks.prompt_sets import load_prompts

    bench = Bench.load("smollm2-135m", lambda message: None)
    try:
        ids = bench.backend.encode_chat([{"role": "user", "content": load_prompts("edit_short")[0]}])
        bench._record(second_tenant("test"), [ids])
        variants = bench._variants("test")
        runs = {name: variants[name](ids, 0) for name in (TRANSFORMERS, OFF, COLD, SECOND)}
    finally:
        bench.close()
    assert len({run.tokens for run in runs.values()}) == 1
    second, off = runs[SECOND].speculation, runs[OFF].speculation
    assert second is not None and (off is None or second.steps < off.steps)
    assert second.steps < len(runs[OFF].tokens) / 4

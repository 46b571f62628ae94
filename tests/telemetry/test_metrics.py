from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from agentspec.protocol.speculation import StepSpeculation
from agentspec.telemetry.metrics import Metrics
from agentspec.telemetry.samples import EngineSample, IndexFigures
from agentspec.telemetry.scrape import ENGINE, INDEX, OnScrape
from agentspec.types import Speculation


def test_everything_is_rendered() -> None:
    index = OnScrape(INDEX, lambda: [IndexFigures(4096, 3, 2, 5, 1.5, True)])
    metrics = Metrics(version="1.2.3", models=["m"], scraped=[index])
    metrics.request("/v1/chat/completions", "m", "ok", 0.2)
    metrics.first_token("m", 0.1)
    metrics.tokens("m", prompt=5, completion=4)
    metrics.speculation("m", Speculation(drafted=5, accepted=2, steps=3))
    metrics.speculation("m", StepSpeculation(drafted=1, steps=14))
    metrics.in_flight.inc()
    families = text_string_to_metric_families(metrics.render().decode())
    samples = {sample.name: sample.value for family in families for sample in family.samples}
    assert samples["agentspec_requests_total"] == 1
    assert samples["agentspec_request_duration_seconds_sum"] == 0.2
    assert samples["agentspec_time_to_first_token_seconds_count"] == 1
    assert (samples["agentspec_prompt_tokens_total"], samples["agentspec_completion_tokens_total"]) == (5, 4)
    assert (samples["agentspec_draft_tokens_total"], samples["agentspec_accepted_tokens_total"]) == (6, 2)
    assert samples["agentspec_verify_steps_total"] == 3 and samples["agentspec_strategy_rounds_total"] == 14
    assert samples["agentspec_requests_in_flight"] == 1
    assert (samples["agentspec_index_bytes"], samples["agentspec_index_sequences"]) == (4096, 3)
    assert samples["agentspec_cache_damaged_rows"] == 2
    assert (samples["agentspec_cache_unread_rows"], samples["agentspec_cache_behind_seconds"]) == (5, 1.5)
    assert samples["agentspec_cache_erasure_pending"] == 1 and samples["agentspec_build_info"] == 1


def test_without_an_index_there_is_no_gauge() -> None:
    assert b"agentspec_index" not in Metrics(version="1", scraped=[OnScrape(INDEX, list)]).render()


def test_engines_count_by_source() -> None:
    sample = EngineSample(
        "local",
        queued=1,
        active=2,
        drafted={"session": 5},
        accepted={"session": 3},
        forwards={1: 2, 4: 3},
        rows=640,
        prefills={"launched": 7, "used": 4, "tokens": 900},
    )
    text = Metrics(version="1", scraped=[OnScrape(ENGINE, lambda: [sample], "backend")]).render().decode()
    assert 'agentspec_engine_draft_tokens_total{backend="local",source="session"} 5.0' in text
    assert 'agentspec_engine_accepted_tokens_total{backend="local",source="session"} 3.0' in text
    assert 'agentspec_engine_active{backend="local"} 2.0' in text
    assert 'agentspec_engine_forwards_total{backend="local"} 5.0' in text
    assert 'agentspec_engine_forward_requests_total{backend="local"} 14.0' in text
    assert 'agentspec_engine_prefills_total{backend="local",outcome="used"} 4.0' in text
    assert 'agentspec_engine_prefill_tokens_total{backend="local"} 900.0' in text
    assert 'agentspec_engine_kv_rows{backend="local"} 640.0' in text

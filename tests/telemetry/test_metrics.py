"""What a scrape of the gateway's metrics shows of requests, of engines and of the token index."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from agentspec.protocol.speculation import StepSpeculation
from agentspec.telemetry.metrics import Metrics
from agentspec.telemetry.samples import EngineSample, IndexFigures
from agentspec.telemetry.scrape import ENGINE, INDEX, SPEC_DECODE, OnScrape
from agentspec.types import Speculation


def test_a_scrape_shows_requests_engines_and_the_index() -> None:
    prefills = {"launched": 7, "used": 4, "tokens": 900}
    engine = EngineSample("local", 1, 2, {"session": 5}, {"session": 3}, {1: 2, 4: 3}, rows=640, prefills=prefills)
    engine = replace(engine, draft_lengths={0: 4, 1: 2, 3: 1}, model="m")
    index = [IndexFigures(4096, 3, 2, 5, 1.5, True)]
    scraped = [OnScrape(INDEX, lambda: index), OnScrape(ENGINE, lambda: [engine], backend="backend")]
    scraped.append(OnScrape(SPEC_DECODE, lambda: [engine], model_name="model", engine="backend"))
    metrics = Metrics(version="1.2.3", models=["m"], scraped=scraped)
    metrics.request("/v1/chat/completions", "m", "ok", 0.2)
    metrics.spent("m", time_to_first_token=0.1, queue_time=None)
    metrics.speculation("m", Speculation(drafted=5, accepted=2, steps=3))
    metrics.speculation("m", StepSpeculation(drafted=1, steps=14))
    metrics.error("m", 502, "upstream_unreachable")
    families = text_string_to_metric_families(metrics.render().decode())
    samples = [sample for one in families for sample in one.samples]
    positions = [one for one in samples if one.name == "vllm:spec_decode_num_accepted_tokens_per_pos_total"]
    vllm = {"model_name": "m", "engine": "local"}
    assert [(one.labels, one.value) for one in positions] == [
        ({**vllm, "position": position}, value) for position, value in (("0", 3), ("1", 1), ("2", 1))
    ]
    found = {sample.name.removeprefix("agentspec_"): sample.value for sample in samples}
    assert [found[f"vllm:spec_decode_num_{name}_total"] for name in ("drafts", "draft_tokens", "accepted_tokens")] == [
        7,
        5,
        3,
    ]
    own = CollectorRegistry()  # of a program that mounts a gateway
    Counter("own", "help", registry=own)
    assert b"own_created" in generate_latest(own)
    assert found["errors_total"] == 1 and not any(name.endswith("_created") for name in found)
    assert {name: found[f"{name}_total"] for name in ("draft_tokens", "accepted_tokens", "verify_steps")} == {
        "draft_tokens": 6,
        "accepted_tokens": 2,
        "verify_steps": 3,
    }
    engines = {name.removeprefix("engine_"): value for name, value in found.items() if name.startswith("engine_")}
    assert engines["draft_tokens_total"] == 5 and engines["accepted_tokens_total"] == 3 and engines["kv_rows"] == 640
    assert (engines["forwards_total"], engines["forward_requests_total"], engines["active"]) == (5, 14, 2)
    assert (found["index_bytes"], found["cache_damaged_rows"], found["cache_unread_rows"]) == (4096, 2, 5)
    assert found["cache_behind_seconds"] == 1.5 and found["cache_erasure_pending"] == found["build_info"] == 1
    assert found["request_duration_seconds_sum"] == 0.2 and found["time_to_first_token_seconds_count"] == 1
    index.clear()
    assert b"agentspec_index" not in metrics.render()

"""What the plug-in publishes about the drafter of a server."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from prometheus_client import generate_latest

from agentspec.backends.openai.metrics import DRAFTER_METRIC, DrafterInfo, parse_drafter
from agentspec.backends.vllm.plugin import METRIC, drafter_of, publish
from agentspec.version import __version__


def speculative(method: str, model: str | None = None) -> SimpleNamespace:
    return SimpleNamespace(method=method, model=model)


@pytest.mark.parametrize(
    ("config", "took_over", "drafter"),
    [
        (None, True, "none"),
        (speculative("suffix"), True, "agentspec"),
        (speculative("suffix"), False, "arctic"),
        (speculative("custom_class", "theirs.Proposer"), True, "custom_class"),
        (speculative("ngram"), True, "ngram"),
        (speculative("eagle3", "some/model"), True, "eagle3"),
    ],
)
def test_who_drafts(config: SimpleNamespace | None, took_over: bool, drafter: str) -> None:
    assert drafter_of(config, took_over=took_over) == drafter


def test_the_second_runner_gives_its_ngram_method_to_ours() -> None:
    assert drafter_of(speculative("ngram_gpu"), took_over=True, took_over_v2=True) == "agentspec"
    assert drafter_of(speculative("eagle3"), took_over=True, took_over_v2=True) == "eagle3"


def test_what_is_published_is_what_the_upstream_backend_reads() -> None:
    for _ in range(2):
        publish(speculative("suffix"), took_over=True)
    assert METRIC == DRAFTER_METRIC
    assert parse_drafter(generate_latest().decode()) == DrafterInfo("agentspec", "suffix", __version__)

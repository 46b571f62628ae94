from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from agentspec.backends.sglang.pushed_corpus import PushedCorpus
from agentspec.backends.torch.text.model_text import ModelText
from agentspec.cache.record import SequenceRecord
from agentspec.cache.storage.sequence_store import SequenceStore
from agentspec.cache.tokens import as_tokens
from agentspec.cli.cache import push
from agentspec.errors import UpstreamError
from agentspec.types import Labels, Namespace


@pytest.fixture
def pushed(monkeypatch: pytest.MonkeyPatch, tmp_path) -> Iterator[list[list[str]]]:
    """What is pushed, from a folder with sequences of two tenants and two tokenizers; 3 was used most, then 2."""
    rows = [
        (1, "default", "k", 4),
        (2, "default", "k", 4),
        (3, "default", "k", 5),
        (4, "other", "k", 6),
        (5, "default", "x", 7),
    ]
    store = SequenceStore.open(tmp_path / "cache", disk_bytes=None, mode="writer")
    for number, tenant, tokenizer, token in rows:
        space = Namespace(tenant, "m", tokenizer)
        store.put(SequenceRecord(number, space, Labels(), as_tokens([token] * 3), as_tokens([1]), 5.0))
    store.flush()
    store.put_usage([(2, 1), (3, 9), (4, 99)], {})
    store.flush()
    store.close()
    found: list[list[str]] = []

    async def record(self: PushedCorpus, documents: list[str]) -> int | None:
        found.append(documents)
        return None if found[:-1] == [documents] else 7

    tokenizer = SimpleNamespace(decode=lambda ids: "-".join(map(str, ids)))
    text = SimpleNamespace(tokenizer=tokenizer, tokenizer_hash="k")
    monkeypatch.setattr(ModelText, "load", lambda *_, **__: text)
    monkeypatch.setattr(PushedCorpus, "push", record)
    yield found


COMMAND = ("cache", "push", "--sglang", "http://localhost:30000", "--model", "m", "--path", "cache")


def test_the_most_used_answers_of_a_tenant_go_first_and_each_once(program, pushed):
    result = program(*COMMAND)
    assert (result.exit_code, result.stdout) == (0, "pushed 2 answers, 7 tokens\n"), result.stderr
    assert program(*COMMAND, "--tokens", 5).exit_code == 0
    assert program(*COMMAND, "--tenant", "other").exit_code == 0
    assert pushed == [["5-5-5", "4-4-4"], ["5-5-5"], ["6-6-6"]]


def test_as_json(program, pushed):
    assert json.loads(program(*COMMAND, "--json").stdout) == {"documents": 2, "tokens": 7, "pushed": True}


def test_again_and_again_until_it_is_stopped(program, pushed, monkeypatch):
    waited: list[float] = []

    def wait(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 1:
            return
        if len(waited) == 2:
            monkeypatch.setattr(push, "_pushed", fail)
            return
        raise KeyboardInterrupt

    def fail(*_: object) -> int:
        raise UpstreamError("upstream is gone")

    monkeypatch.setattr(push.time, "sleep", wait)
    result = program(*COMMAND, "--every", 5)
    assert result.stdout.splitlines()[:2] == ["pushed 2 answers, 7 tokens", "nothing new"]
    assert "upstream is gone; tried again in 5 s" in result.stderr
    assert waited == [5.0] * 3
    monkeypatch.setattr(push, "_pushed", fail)
    assert program(*COMMAND).exit_code == 1


def test_a_bad_address_is_named(program, pushed):
    result = program("cache", "push", "--sglang", "nowhere", "--model", "m", "--path", "cache")
    assert result.exit_code == 2 and "--sglang nowhere" in result.stderr

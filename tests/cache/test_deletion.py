"""What a deletion covers, and what text is never shared."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from agentspec.cache import SuffixCache, deletion
from agentspec.cache.deletion import Decode, Selection, pause_between_looks, select
from agentspec.cache.partition import Partition
from agentspec.cache.tokens import SequenceRecord, Tokens
from agentspec.errors import ConfigurationError, InvalidRequestError
from agentspec.types import Namespace


def tokens(*ids: int) -> Tokens:
    return np.array(ids, dtype=np.int32)


def letters(ids: object) -> str:
    return "".join(chr(token) for token in ids)  # type: ignore[attr-defined]


def test_text_is_found_however_it_was_tokenised() -> None:
    pieces = {1: "pass", 2: "word", 3: "p", 4: "assw", 5: "ord", 6: " is hunter2"}

    def decode(ids: object) -> str:
        return "".join(pieces[token] for token in ids)  # type: ignore[attr-defined]

    selection = select(text="password is", decode=decode)
    assert selection.holds(tokens(1, 2, 6)) and selection.holds(tokens(3, 4, 5, 6))
    assert not selection.holds(tokens(1, 6)) and not selection.holds(tokens(4, 5, 6))


def test_a_scope_tells_who_is_concerned_without_naming_anyone() -> None:
    scope = select(session="alice@example.org", tenant="acme", tokenizer="k", older_than=60).scope
    assert "alice" not in repr(scope) and "acme" not in repr(scope)
    assert scope.concerns(Namespace("acme", "m", "k")) and not scope.searched
    assert not scope.concerns(Namespace("acme", "m", "other")) and not scope.concerns(Namespace("acm", "m", "k"))
    now = time.time()
    assert scope.covers("alice@example.org", now - 70) and not scope.covers("alice@example.org", now - 50)
    assert not scope.covers("bob", now - 70) and not scope.covers(None, now - 70)


def test_ages_are_seconds_or_a_timedelta() -> None:
    for span in (60, 60.0, timedelta(minutes=1)):
        earliest = time.time() - 60
        before = select(older_than=span).before
        assert before is not None and earliest <= before <= time.time() - 60


@pytest.mark.parametrize(
    ("conditions", "param"),
    [
        ({}, None),
        ({"tokenizer": "k"}, None),
        ({"session": 5}, "session"),
        ({"text": "x"}, "text"),
        ({"text": "", "decode": letters}, "text"),
        ({"older_than": -1}, "older_than"),
        ({"older_than": "30d"}, "older_than"),
        ({"older_than": float("nan")}, "older_than"),
    ],
)
def test_conditions_that_cannot_be(conditions: dict[str, object], param: str | None) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        select(**conditions)  # type: ignore[arg-type]
    assert caught.value.param == param


def test_without_a_pattern_a_selection_is_its_scope() -> None:
    assert not Selection(session="s").searched
    assert Selection(session="s").holds(tokens(1))


def test_a_deletion_by_session_hashes_each_name_once(monkeypatch: pytest.MonkeyPatch) -> None:
    partition = Partition(Namespace("t"))
    for number in range(300):
        session = [None, "a", "b"][number % 3]
        partition.add(SequenceRecord(number, Namespace("t"), session, tokens(1, 2), tokens(), float(number)))
    scope = select(session="a").scope
    hashed: list[str] = []
    digest = deletion._digest
    monkeypatch.setattr(deletion, "_digest", lambda name: hashed.append(name) or digest(name))  # type: ignore[func-returns-value]
    assert partition.covered(scope) == list(range(1, 300, 3))
    assert sorted(hashed) == ["a", "b"]
    assert partition.covered(replace(scope, before=10.0)) == [1, 4, 7]
    assert partition.covered(replace(scope, session=None, before=3.0)) == [0, 1, 2]


def test_a_short_term_is_looked_after_often() -> None:
    spans = {None: 600.0, 86400.0: 600.0, 240.0: 10.0, 1.0: 1.0, 0.0: 1.0}
    assert {term: pause_between_looks(term, 600.0) for term in spans} == spans


KEY = r"sk-[a-z0-9]{8}"


def decode(ids: object) -> str:
    return "".join(map(chr, ids))  # type: ignore[call-overload]


def encode(text: str) -> list[int]:
    return [ord(character) for character in text]


def say(cache: SuffixCache, prompt: str, output: str, decode: Decode | None = decode) -> None:
    with cache.request(encode(prompt), session="s", decode=decode) as request:
        request.extend(encode(output))


def drafted(cache: SuffixCache, text: str, session: str) -> str:
    with cache.request(encode(text), session=session, store=False) as request:
        draft = request.draft(max_tokens=1)
        return decode(draft.tokens.tolist())


def test_a_secret_stays_in_its_own_session(tmp_path: Path) -> None:
    with SuffixCache.open(tmp_path, refuse_patterns=[KEY, "never this"]) as cache:
        say(cache, "the key: ", "sk-12345678 of course")
        assert (cache.stats().refused, cache.stats().sequences) == (1, 0)
        assert drafted(cache, "the key: sk-12345678 of course. again: sk-", "s") == "1"
        assert drafted(cache, "sk-", "other") == ""
        say(cache, "anything", "harmless")
        assert (cache.stats().refused, cache.stats().sequences) == (1, 1)
        assert drafted(cache, "ha", "other") == "r"
    with SuffixCache.open(tmp_path) as cache:
        assert cache.stats().sequences == 1


def test_the_end_of_the_prompt_is_kept_and_so_looked_at() -> None:
    with SuffixCache.open(refuse_patterns=[KEY]) as cache:
        say(cache, "my key is sk-12345678", "thank you")
        say(cache, "my key is sk-1234", "5678")  # across
        say(cache, "my key is sk-12345678" + 64 * ".", "thank you")
        assert (cache.stats().refused, cache.stats().sequences) == (2, 1)


def test_what_nobody_can_read_is_refused() -> None:
    with SuffixCache.open(refuse_patterns=[KEY]) as cache:
        say(cache, "a", "harmless", decode=None)
        assert (cache.stats().refused, cache.stats().sequences) == (1, 0)


def test_an_invalid_pattern() -> None:
    with pytest.raises(ConfigurationError, match=r"refuse_patterns.*'\(open'") as caught:
        SuffixCache.open(refuse_patterns=["fine", "(open"])
    assert caught.value.param == "refuse_patterns"
    with pytest.raises(ConfigurationError, match=r"refuse_patterns.*b'key'"):
        SuffixCache.open(refuse_patterns=[b"key"])  # type: ignore[list-item]  # matches no text

"""The corpus, driven as SGLang's NGRAM worker drives it."""

from __future__ import annotations

import gc
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agentspec.backends.engine_plugin import drafter
from agentspec.backends.sglang.corpus import SEPARATOR, TokenCacheCorpus, request_info
from agentspec.cache import SuffixCache
from agentspec.types import Labels
from tests.backends.conftest import followed_requests, stored
from tests.backends.sglang.conftest import NODES, Corpora, NGRAMWorker, Req, Scheduler, parents_of, verified

TEXT = list(range(100, 160))
OTHER = list(range(300, 360))
THIRD = list(range(500, 560))
TAKEN = "agentspec:session=s"


def scheduler(corpus: TokenCacheCorpus, *, overlap: bool = True) -> Scheduler:
    return Scheduler(NGRAMWorker(corpus, overlap=overlap), overlap=overlap)


def first_tree(corpus: TokenCacheCorpus, req: Req, text: list[int]) -> int:
    """How many of a text's tokens the first tree for a request holds, whose output begins with the first of them."""
    req.output_ids.append(text[0])
    corpus.see([req])
    tail = [*req.origin_input_ids_unpadded, text[0]]
    tokens, mask = corpus.batch_get([req.rid], [tail[-18:]], [len(tail)])
    return verified(tokens.tolist(), parents_of(mask.reshape(NODES, NODES)), text[1:])


@pytest.mark.parametrize("overlap", [True, False])
def test_a_second_answer_is_drafted_from_the_first(corpora: Corpora, cache: SuffixCache, overlap: bool) -> None:
    server = scheduler(corpora(), overlap=overlap)
    server.run(Req("a", [1, 2, 3], TEXT))
    slow, server.steps = server.steps, 0
    server.run(Req("b", [4, 5, 3], TEXT))
    assert server.steps < len(TEXT) / 4 < slow
    assert server.worker.ngram_corpus.flush()
    assert stored(cache) == [TEXT, TEXT]
    stats = cache.stats()
    assert stats.accepted >= len(TEXT) / 2


def test_a_request_that_was_set_back_goes_on_and_is_kept_up_to_where_it_stopped(
    corpora: Corpora, cache: SuffixCache
) -> None:
    corpus = corpora()
    req = Req("a", [1], [])
    req.output_ids.extend(TEXT[:5])
    corpus.see([req])
    corpus.erase_match_state(["a", "unknown"])
    req.output_ids.extend(TEXT[5:6])
    corpus.see([req])
    req.output_ids.extend(TEXT[6:9])
    req.finish(7)
    for _ in range(2):
        corpus.finish("a")
    assert corpus.flush()
    assert stored(cache) == [TEXT[:7]]


def test_requests_that_vanish_or_give_their_name_to_another_are_ended(corpora: Corpora, cache: SuffixCache) -> None:
    corpus = corpora()
    reqs = [Req("a", [1], []) for _ in range(2)]
    for req, text in zip(reqs, (TEXT[:4], OTHER[:4]), strict=True):
        req.output_ids.extend(text)
        corpus.see([req])
    gone = Req("b", [1], [])
    gone.output_ids.extend(TEXT[:5])
    corpus.see([*reqs[1:], gone])
    del gone
    gc.collect()
    corpus.erase_match_state([])
    assert corpus.flush() and stored(cache) == []
    reqs[-1].finish(4)
    corpus.reset()
    assert corpus.flush()
    assert stored(cache) == [OTHER[:4]]


@pytest.mark.parametrize(
    ("reason", "length", "kept", "ends"),
    [
        ({"type": "stop", "matched": 102}, 3, [TEXT[:3]], [102]),
        ({"type": "stop", "matched": "!"}, 3, [TEXT[:3]], []),
        ({"type": "length"}, 3, [TEXT[:3]], []),
        ({"type": "length"}, 1, [], []),
        ({"type": "abort"}, 3, [], []),
    ],
)
def test_an_output_is_kept_as_it_ended(
    corpora: Corpora, cache: SuffixCache, reason: dict[str, Any], length: int, kept: list[list[int]], ends: list[int]
) -> None:
    corpus, req = corpora(), Req("a", [1], [])
    req.output_ids.extend(TEXT[:length])
    corpus.see([req])
    req.finish(length, **reason)
    corpus.finish("a")
    assert corpus.flush()
    assert stored(cache) == kept and cache.request([1]).drafter.ends().tolist() == ends


def test_salts_keep_requests_apart(corpora: Corpora, cache: SuffixCache) -> None:
    server = scheduler(corpora())
    server.run(Req("a", [1], TEXT))
    for salts in ({"cache_salt": "x"}, {"extra_key": "x"}, {"cache_salt": "pepper", "extra_key": "x"}):
        req = Req("salted", [3], TEXT, **salts)
        assert first_tree(server.worker.ngram_corpus, req, TEXT) == 0
        server.worker.ngram_corpus.reset()
    server.run(Req("b", [1], OTHER, cache_salt="x"))
    assert server.worker.ngram_corpus.flush()
    assert stored(cache) == [TEXT]
    server.run(Req("c", [1], OTHER, cache_salt="pepper"), Req("d", [1], OTHER[:30], extra_key="pepper"))
    assert server.worker.ngram_corpus.flush()
    assert stored(cache, "acme") == [OTHER[:30], OTHER]
    assert first_tree(server.worker.ngram_corpus, Req("e", [1], OTHER, extra_key="pepper"), OTHER) > 3
    assert first_tree(server.worker.ngram_corpus, Req("f", [1], OTHER), OTHER) == 0
    server.run(Req("g", [1], THIRD, lora_id="one", extra_key="one"))  # so do adapters
    for name, adapter, found in (("h", None, False), ("i", "two", False), ("j", "one", True)):
        req = Req(name, [1], THIRD, lora_id=adapter, extra_key=adapter)
        assert (first_tree(server.worker.ngram_corpus, req, THIRD) > 3) is found


@pytest.mark.parametrize("adapter", [None, "l"])
@pytest.mark.parametrize("salt", [None, "x", "elastic_ep_size="])
def test_elastic_expert_parallelism_is_no_salt(adapter: str | None, salt: str | None) -> None:
    key = "|".join([*([f"{salt or ''}{adapter or ''}"] if salt or adapter else []), "elastic_ep_size=16"])
    assert request_info(Req("a", [1], [], extra_key=key, lora_id=adapter)).salt == salt


def custom(**params: Any) -> SimpleNamespace:
    return SimpleNamespace(custom_params=params)


def test_what_a_request_says_of_itself() -> None:
    params = custom(agentspec_session="s", agentspec_workflow="w", agentspec_step=3, agentspec_prediction=[1, 2])
    params.custom_params |= {"agentspec_store": "off", "agentspec_speculation": ["on"]}
    info = request_info(Req("a", [1], [], sampling_params=params, session_id="theirs", lora_id="l", extra_key="kl"))
    assert info.labels == Labels("s", "w", None)
    assert (info.prediction, info.salt, info.adapter) == ((1, 2), "k", "l") and not info.store and not info.speculation
    assert request_info(Req("a", [1], [], session_id="theirs")).labels.session == "theirs"
    session = SimpleNamespace(session_id="opened")
    plain = request_info(Req("a", [1], [], session=session, sampling_params=custom(agentspec_prediction="no")))
    assert (plain.labels.session, plain.prediction, plain.salt, plain.adapter) == ("opened", (), None, "")


@pytest.mark.parametrize("patience", [0.0, 60.0])
def test_what_is_forgotten_during_a_request_does_not_come_back(
    corpora: Corpora, cache: SuffixCache, monkeypatch: pytest.MonkeyPatch, patience: float
) -> None:
    """Nor where a search has no time, and what it found before is drafted."""
    server = scheduler(corpora())
    server.run(Req("a", [1], TEXT))
    req = Req("b", [2], [])
    assert first_tree(server.worker.ngram_corpus, req, TEXT) == NODES - 1
    cache.forget(tenant="default")
    monkeypatch.setattr(drafter, "PATIENCE", patience)
    req.output_ids.extend(TEXT[1:3])
    server.worker.ngram_corpus.see([req])
    tokens, _ = server.worker.ngram_corpus.batch_get(["b"], [[2, *TEXT[:3]]], [4])
    assert not set(tokens.tolist()) & set(TEXT[3:])
    req.finish(3)
    server.worker.ngram_corpus.finish("b")
    assert server.worker.ngram_corpus.flush() and stored(cache) == []


def test_requests_leave_nothing_behind_in_memory(corpora: Corpora) -> None:
    """Salted or not, in groups, finished, aborted, and gone without a word."""
    corpus, rng, before = corpora(), random.Random(1), followed_requests()
    for number in range(1000):
        params = custom(agentspec_group=f"g{number // 4}", agentspec_store=rng.choice(["on", "off", "off"]))
        req = Req(f"{number}", [1], [], sampling_params=params, cache_salt=rng.choice([None, "pepper", "x"]))
        req.output_ids.extend([number % 900, 5])
        corpus.see([req])
        corpus.batch_get([req.rid], [[1, number % 900, 5]], [3])
        if number % 2:
            req.finish(2, type=rng.choice(["stop", "abort", "length"]))
            corpus.finish(req.rid)
    del req
    corpus.erase_match_state([])
    assert corpus.flush(60.0)
    assert (followed_requests() - before).total() <= 1


def test_external_texts_serve_everyone(corpora: Corpora) -> None:
    corpus = corpora(most=60)
    assert corpus.load_external_corpus_named("book", [[*TEXT[:25]], [*TEXT[25:30], SEPARATOR, *OTHER[:9]]]) == 40
    corpus.commit_external_corpus_load("book", 40)
    assert first_tree(corpus, Req("a", [1], TEXT), TEXT) > 3
    assert first_tree(corpus, Req("b", [1], OTHER, cache_salt="x"), OTHER) > 3
    for name, chunks in (("book", [[1]]), ("long", [[1] * 15, [2] * 6]), ("none", [[SEPARATOR]]), (TAKEN, [[1]])):
        with pytest.raises(ValueError, match=name):
            corpus.load_external_corpus_named(name, chunks)
    assert corpus.list_external_corpora() == {"book": 40}
    corpus.remove_external_corpus("book")
    corpus.remove_external_corpus("book")
    assert corpus.list_external_corpora() == {}
    assert first_tree(corpus, Req("c", [1], TEXT), TEXT) == 0


def test_all_ranks_get_the_first_ones_trees(corpora: Corpora) -> None:
    sent: list[Any] = []
    first = SimpleNamespace(
        world_size=2, rank_in_group=0, broadcast_object=lambda made, src: (sent.append(made), made)[1]
    )
    second = SimpleNamespace(world_size=2, rank_in_group=1, broadcast_object=lambda made, src: sent[-1])
    ranks = corpora(first), corpora(second, here=False)
    for step in range(3):
        req = Req(f"r{step}", TEXT, [])
        req.output_ids.extend(TEXT[: step + 1])
        tail = [*TEXT, *TEXT[: step + 1]]
        found = []
        for corpus in ranks:
            corpus.see([req])
            found.append(corpus.batch_get([req.rid], [tail[-18:]], [len(tail)]))
        for one, other in zip(*found, strict=True):
            assert np.array_equal(one, other)
        assert len(sent[-1][0].tokens) == NODES - 1
        for corpus in ranks:
            corpus.finish(req.rid)
            assert corpus.flush()


def test_a_failure_costs_drafts_only(corpora: Corpora, caplog: pytest.LogCaptureFixture) -> None:
    corpus = corpora()
    for rid in ("a", "b"):
        broken = Req(rid, [2**40], [])
        corpus.see([broken])
        tokens, _ = corpus.batch_get([rid], [[5]], [1])
        assert tokens.tolist() == [5] + [0] * (NODES - 1)
        corpus.finish(rid)
    req = Req("c", [1], [])
    corpus.see([req])
    req.output_ids.append(2**40)
    corpus.see([req])
    assert corpus.batch_get(["c"], [[1, 2**40]], [2])[0].tolist() == [2**40] + [0] * (NODES - 1)
    corpus.finish("c")
    assert first_tree(corpus, Req("d", TEXT, TEXT, input_embeds=[[0.5]]), TEXT) == 0  # no token ids to search by
    assert corpus.batch_get(["unknown"], [[5]], [1])[0].tolist() == [5] + [0] * (NODES - 1)
    assert caplog.text.count("without drafts") == 1

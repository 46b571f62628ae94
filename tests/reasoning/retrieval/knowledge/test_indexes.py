"""What every index promises: an order without chance, and features with which the same order can be found elsewhere."""

from __future__ import annotations

import asyncio
import unicodedata
from collections.abc import Sequence

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from agentspec.errors import ConfigurationError
from agentspec.reasoning.retrieval.knowledge.base import Document, Hit, Query, ranked
from agentspec.reasoning.retrieval.knowledge.bm25 import Bm25Index, terms
from agentspec.reasoning.retrieval.knowledge.dense import POOL, DenseIndex, products
from agentspec.reasoning.retrieval.knowledge.folder import Index
from tests.fakes import FakeEncoder

WORDS = "cat dog bird fish tree house river stone cloud night".split()
texts = st.lists(st.sampled_from(WORDS), min_size=1, max_size=5).map(" ".join)
corpora = st.lists(texts, min_size=1, max_size=60)
queries = st.lists(texts, min_size=1, max_size=24)
kinds = st.sampled_from(["dense", "hnsw", "bm25"])


def encoded(index: Index, asked: Sequence[str]) -> list[Query]:
    async def all_of_them() -> list[Query]:
        return [await index.metric.encode(text) for text in asked]

    return asyncio.run(all_of_them())


def seen(hits: Sequence[Hit]) -> list[tuple[str, float]]:
    return [(hit.document.id, hit.score) for hit in hits]


@given(kind=kinds, corpus=corpora, asked=queries, count=st.integers(1, 70))
def test_a_result_depends_neither_on_its_batch_nor_on_the_count(make_index, kind, corpus, asked, count):
    index = make_index(kind, corpus)
    together = index.search(encoded(index, asked), count)
    for query, hits in zip(encoded(index, asked), together, strict=True):
        (alone,) = index.search([query], count)
        (first,) = index.search([query], 1)
        assert seen(alone) == seen(hits)
        assert seen(first) == seen(hits)[:1]


@given(kind=kinds, corpus=corpora, asked=queries, count=st.integers(1, 70))
def test_the_metric_ranks_hits_as_the_index_does(make_index, kind, corpus, asked, count):
    index = make_index(kind, corpus)
    wanted = encoded(index, asked)
    everything = {hit.document.id: hit for hits in index.search(wanted, count) for hit in hits}
    for query, hits in zip(wanted, index.search(wanted, count), strict=True):
        assert index.metric.scores(query, hits).tolist() == [hit.score for hit in hits]
        assert ranked(hits[::-1], index.metric.scores(query, hits[::-1])) == list(hits)
        if kind != "hnsw":  # a graph may miss what another query found
            pool = list(everything.values())
            assert ranked(pool, index.metric.scores(query, pool))[0].document.id == hits[0].document.id


@given(corpus=corpora, asked=texts, count=st.integers(1, 70))
def test_the_exact_index_gives_what_comparing_everything_gives(make_index, corpus, asked, count):
    index = make_index("dense", corpus)
    (query,) = encoded(index, [asked])
    scores = products(FakeEncoder().encode_all(corpus), query.features)
    order = sorted(range(len(corpus)), key=lambda at: (-scores[at], at))
    (hits,) = index.search([query], count)
    assert seen(hits) == [(f"{at:03}", scores[at]) for at in order[:count]]


@given(corpus=corpora, asked=texts, count=st.integers(1, 70))
def test_words_are_weighed_as_bm25s_weighs_them(make_index, corpus, asked, count):
    import bm25s

    model = bm25s.BM25(method="lucene", dtype="float64")
    model.index([text.split() for text in corpus], show_progress=False)
    known = [word for word in asked.split() if word in model.vocab_dict]
    scores = model.get_scores(known) if known else np.zeros(len(corpus))
    index = make_index("bm25", corpus)
    (hits,) = index.search(encoded(index, [asked]), count)
    assert [hit.score for hit in hits] == pytest.approx(sorted(scores, reverse=True)[:count])
    assert [hit.score for hit in hits] == pytest.approx([scores[int(hit.document.id)] for hit in hits])


def test_ties_are_ordered_by_document_id(make_index, kind):
    index = make_index(kind, ["cat"] * 100 + ["dog"])
    (hits,) = index.search(encoded(index, ["cat"]), 40)
    assert [hit.document.id for hit in hits] == [f"{at:03}" for at in range(40)]


def test_a_graph_finds_nearly_all_and_never_more_than_its_pool(make_index):
    random = np.random.default_rng(0)
    corpus = [" ".join(random.choice(WORDS, 6)) + f" {at}" for at in range(600)]
    exact, graph = make_index("dense", corpus), make_index("hnsw", corpus)
    asked = encoded(exact, corpus[:50])
    pairs = list(zip(exact.search(asked, 10), graph.search(asked, 10), strict=True))
    common = [len({hit.document.id for hit in one} & {hit.document.id for hit in other}) for one, other in pairs]
    assert np.mean(common) > 9.5
    assert len(graph.search(asked[:1], 600)[0]) == POOL


def test_queries_of_another_metric_are_refused(make_index, kind):
    index = make_index(kind, ["cat"])
    for features in (None, np.zeros(3, np.float32), [1.0]):
        with pytest.raises(ConfigurationError, match="own metric"):
            index.search([Query("cat", features)], 1)
    assert index.search([], 1) == []


def test_corpora_that_cannot_be_searched_are_refused():
    with pytest.raises(ConfigurationError, match="no words"):
        Bm25Index.build([Document("1", "the"), Document("2", "!")])
    with pytest.raises(ConfigurationError, match="not finite"):
        DenseIndex.build([Document("1", "a")], np.full((1, 16), np.nan, np.float32), FakeEncoder())
    with pytest.raises(ValueError, match="1 vectors"):
        DenseIndex.build([], np.ones((1, 16), np.float32), FakeEncoder())


def test_terms_are_words_in_lower_case_with_their_vowel_signs_and_accents():
    assert terms("A cat, the CAT; déjà-vu 42") == ("cat", "the", "cat", "déjà", "vu", "42")
    assert terms("हिन्दी भाषा; שָׁלוֹם") == ("हिन्दी", "भाषा", unicodedata.normalize("NFC", "שָׁלוֹם"))
    assert terms(unicodedata.normalize("NFD", "Zoë")) == terms("Zoë") == ("zoë",)

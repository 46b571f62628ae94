from __future__ import annotations

import unicodedata

import pytest

from agentspec.errors import ConfigurationError
from agentspec.reasoning.retrieval.knowledge.base import Document, Hit, Query, ranked
from agentspec.reasoning.retrieval.knowledge.bm25 import LexicalMetric, terms, weighed, with_counts

pytestmark = pytest.mark.anyio


def hits(*texts: str) -> list[Hit]:
    return [with_counts(Hit(Document(str(at), text), 0.0)) for at, text in enumerate(texts)]


def test_terms_are_words_in_lower_case_as_often_as_they_occur():
    assert terms("A cat, the CAT; déjà-vu 42") == ("cat", "the", "cat", "déjà", "vu", "42")


def test_words_keep_their_vowel_signs_and_accents():
    assert terms("हिन्दी भाषा; שָׁלוֹם") == ("हिन्दी", "भाषा", unicodedata.normalize("NFC", "שָׁלוֹם"))
    assert terms(unicodedata.normalize("NFD", "Zoë")) == terms("Zoë") == ("zoë",)


def test_weights_add_up_in_the_order_of_the_query():
    weights = {"a": 1e16, "b": 1.0, "c": -1e16}
    assert weighed(("a", "b", "c"), weights) == 0.0
    assert weighed(("a", "c", "b"), weights) == 1.0
    assert weighed(("a", "a", "unknown"), weights) == 2e16


async def test_rare_words_of_short_documents_count_most():
    metric = LexicalMetric()
    found = hits("the cat sat", "the dog sat on the mat", "the bird", "the cat " + "and so on " * 20)
    query = await metric.encode("the cat")
    assert [hit.document.id for hit in ranked(found, metric.scores(query, found))][:2] == ["0", "3"]


async def test_no_hits_and_documents_without_words_have_scores():
    metric = LexicalMetric()
    query = await metric.encode("cat")
    assert metric.scores(query, []).shape == (0,)
    assert metric.scores(query, hits("!", "?")).tolist() == [0.0, 0.0]


async def test_hits_and_queries_of_another_metric_are_refused():
    metric = LexicalMetric()
    with pytest.raises(ConfigurationError, match="carries no counts"):
        metric.scores(await metric.encode("cat"), [Hit(Document("1", "cat"), 0.0)])
    with pytest.raises(ConfigurationError, match="not encoded for words"):
        metric.scores(Query("cat"), hits("cat"))

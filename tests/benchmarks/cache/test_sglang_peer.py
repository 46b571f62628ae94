"""SGLang's corpus as a peer. Its source is in the wheel; what needs it is in the long tier."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from agentspec.benchmarks.cache.sglang_peer import NgramCorpus, _parents, compare_with_sglang, compile_corpus
from agentspec.errors import ConfigurationError
from agentspec.recordings.traces import EncodedCall
from tests.backends.conftest import Unpack, released

__all__ = ["released"]  # a fixture


def calls(count: int) -> list[EncodedCall]:
    """Two sessions whose answers differ in one number."""
    answer = [[*range(100, 130), number, *range(130, 160)] for number in range(count)]
    return [
        EncodedCall(f"s{number % 2}", np.arange(number, number + 9, dtype=np.int32), np.array(text, dtype=np.int32))
        for number, text in enumerate(answer)
    ]


def test_a_parent_is_the_latest_ancestor() -> None:
    mask = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]], np.uint8)
    assert _parents(mask).tolist() == [-1, 0, 1, 0]


def test_a_folder_without_the_source_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"ngram_corpus/ngram\.h below"):
        compile_corpus(tmp_path, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_both_draft_what_was_generated_before(released: Unpack, tmp_path: Path) -> None:
    library = compile_corpus(released("sglang", "0.5.23"), tmp_path)
    corpus = NgramCorpus(library, 8)
    corpus.put(np.arange(50, 70, dtype=np.int32))
    draft = corpus.draft(0, np.arange(50, 60, dtype=np.int32), 10)
    assert draft.tokens.tolist() == list(range(60, 67)) and draft.parents.tolist() == list(range(-1, 6))
    corpus.close()
    empty, restarted, tenants = compare_with_sglang(calls(12), 8, library)
    assert empty.ours > 3 and empty.ngram > 3 and empty.fed >= empty.ngram
    assert restarted.situation == "after a restart" and restarted.ours > restarted.ngram
    assert (tenants.ngram, tenants.fed) == (empty.ngram, empty.fed) and tenants.ours < empty.ours

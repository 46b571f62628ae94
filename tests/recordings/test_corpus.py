from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from agentspec.errors import ConfigurationError
from agentspec.reasoning.retrieval.knowledge.base import Document
from agentspec.recordings.corpus import read_corpus, read_texts

GOOD = '{"id": "a", "title": "T", "text": "one"}\n\n{"id": 2, "text": "two", "metadata": {"page": 1}, "more": 0}\n'


def test_documents_are_read_plain_and_compressed(tmp_path: Path):
    plain, compressed = tmp_path / "c.jsonl", tmp_path / "c.jsonl.gz"
    plain.write_text(GOOD)
    compressed.write_bytes(gzip.compress(GOOD.encode()))
    expected = [Document("a", "one", "T"), Document("2", "two", "", {"page": 1})]
    assert list(read_corpus(plain)) == list(read_corpus(compressed)) == expected
    assert list(read_texts(compressed)) == ["T\none", "two"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("no", "not valid JSON"),
        ("[]", "not a JSON object"),
        ('{"text": "x"}', '"id" must be'),
        ('{"id": true, "text": "x"}', '"id" must be'),
        ('{"id": "", "text": "x"}', '"id" must be'),
        ('{"id": "b"}', '"text" must be'),
        ('{"id": "b", "text": " "}', '"text" must be'),
        ('{"id": "b", "text": "x", "title": 1}', '"title" must be'),
        ('{"id": "b", "text": "x", "metadata": []}', '"metadata" must be'),
        (r'{"id": "b", "text": "x \ud83d"}', "lone surrogate"),
        (r'{"id": "b", "text": "x", "metadata": {"\udc00": 1}}', "lone surrogate"),
        ('{"id": "a", "text": "x"}', "the id 'a' was given in"),
    ],
)
def test_a_bad_line_is_named_and_can_be_left_out(tmp_path: Path, line: str, said: str):
    path = tmp_path / "c.jsonl"
    path.write_text(GOOD + line + "\n")
    with pytest.raises(ConfigurationError, match=f"c.jsonl:4: .*{said}"):
        list(read_corpus(path))
    left_out: list[Exception] = []
    assert len(list(read_corpus(path, left_out.append))) == 2 and len(left_out) == 1

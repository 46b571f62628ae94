"""A release of SGLang has what the plug-in needs, and its NGRAM worker drafts from our corpus; whole: test_server.py.

Its wheel is unpacked, not installed. The worker's drafting is cut out of its source.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agentspec.backends.engine_plugin.source_contract import missing
from agentspec.backends.sglang import plugin
from agentspec.backends.sglang.corpus import TokenCacheCorpus
from agentspec.cache import SuffixCache
from tests.backends.conftest import NEWEST, Unpack, stored
from tests.backends.sglang.conftest import NODES, Corpora, Req, Scheduler

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

OURS = {"_prepare_draft_tokens", "_efficient_concat_last_n", "_update_ngram_corpus"}


@pytest.fixture(scope="module", params=["0.5.23", *NEWEST])
def sglang(request: pytest.FixtureRequest, released: Unpack) -> Path:
    return released("sglang", request.param)


def worker_source(sglang: Path) -> ast.Module:
    return ast.parse((sglang / "srt/speculative/ngram_worker.py").read_bytes())


@pytest.fixture(scope="module")
def worker(sglang: Path) -> Any:
    """The released `NGRAMWorker`, its drafting only, in a module with what that needs."""
    tree = worker_source(sglang)
    (klass,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "NGRAMWorker"]
    klass.body = [node for node in klass.body if isinstance(node, ast.FunctionDef) and node.name in OURS]
    klass.bases = []
    module = ModuleType("ngram_worker")
    future = ast.parse("from __future__ import annotations").body
    vars(module).update(np=np)
    exec(compile(ast.Module([*future, klass], []), "ngram_worker.py", "exec"), vars(module))
    return module


def test_the_worker_calls_its_corpus_as_ours_can_be_called(sglang: Path) -> None:
    for call in ast.walk(worker_source(sglang)):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            owner, name = ast.unparse(call.func.value), call.func.attr
            if owner == "self.ngram_corpus":
                signature = inspect.signature(getattr(TokenCacheCorpus, name))
                signature.bind(None, *call.args, **{keyword.arg or "": None for keyword in call.keywords})


def test_the_release_has_what_the_plug_in_needs(sglang: Path) -> None:
    assert missing(sglang, plugin.REQUIREMENTS) == []
    calls = [node for node in ast.walk(worker_source(sglang)) if isinstance(node, ast.Call)]
    (made,) = [call for call in calls if ast.unparse(call.func) == "NgramCorpus"]
    assert not made.args
    options = {keyword.arg for keyword in made.keywords}
    assert {"draft_token_num", "external_corpus_max_tokens", "max_bfs_breadth"} <= options and None not in options


@pytest.mark.parametrize("overlap", [True, False])
def test_the_released_worker_drafts_from_our_corpus(
    worker: Any, corpora: Corpora, cache: SuffixCache, overlap: bool
) -> None:
    class Started(worker.NGRAMWorker):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.ngram_corpus, self.enable_overlap = corpora(), overlap
            self.draft_token_num, self.max_trie_depth = NODES, 18

        def note_request_finished(self, **how: object) -> None:
            """As in the release."""

    def seen(self: Any, batch: SimpleNamespace) -> Any:
        found = prepared(self, batch)
        self._update_ngram_corpus(batch)
        return found

    made = plugin.worker_with_cache(Started)
    prepared, made._prepare_draft_tokens = made._prepare_draft_tokens, seen
    made.__init__ = Started.__init__
    server = Scheduler(made(), overlap=overlap)
    texts = [list(range(100 + 50 * i, 130 + 55 * i)) for i in range(4)]
    for turn in range(2):
        server.steps = 0
        server.run(*(Req(f"{turn}{row}", [1, row], text) for row, text in enumerate(texts)))
    assert server.steps < max(map(len, texts)) / 3
    assert server.worker.ngram_corpus.flush()
    assert stored(cache) == sorted(texts * 2)

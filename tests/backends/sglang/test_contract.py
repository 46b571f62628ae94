"""A release of SGLang has what the plug-in needs, and its own code runs on our corpus.

Its wheel is unpacked, not installed: most of it cannot be imported without a GPU. What is run of it is cut out of its
source: the NGRAM worker's drafting, and the layout of trees in its C++ corpus.
"""

from __future__ import annotations

import ast
import ctypes
import inspect
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from agentspec.backends.engine_plugin.source_contract import missing
from agentspec.backends.sglang import plugin
from agentspec.backends.sglang.corpus import TokenCacheCorpus
from agentspec.backends.sglang.drafting import to_arrays
from agentspec.cache import SuffixCache
from tests.backends.conftest import NEWEST, Unpack, stored
from tests.backends.sglang.conftest import NODES, Corpora, Req, Scheduler, parents_of
from tests.backends.sglang.test_tree_layout import random_tree

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

OURS = {"_prepare_draft_tokens", "_efficient_concat_last_n", "_update_ngram_corpus"}
WRAPPER = """
#include "result.h"
using namespace sglang::ngram;
extern "C" void arrange(const int* paths, int count, int last, int nodes, int* tokens, unsigned char* mask) {
  std::vector<std::vector<int32_t>> all(count);
  for (auto& path : all) { for (int left = *paths++; left; --left) path.push_back(*paths++); }
  auto found = buildResultFromLeafPaths_(last, nodes, all);
  for (int i = 0; i < nodes; ++i) tokens[i] = found.token[i];
  for (int i = 0; i < nodes * nodes; ++i) mask[i] = found.mask[i];
}
"""


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
    links = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "_derive_tree_links"]
    module = ModuleType("ngram_worker")
    future = ast.parse("from __future__ import annotations").body
    vars(module).update(np=np, torch=torch)
    exec(compile(ast.Module([*future, *links, klass], []), "ngram_worker.py", "exec"), vars(module))
    return module


def path_to(tokens: list[int], parents: list[int], node: int) -> tuple[int, ...]:
    path: list[int] = []
    while node >= 0:
        path.append(tokens[node])
        node = parents[node]
    return tuple(reversed(path))


def test_the_release_has_what_the_plug_in_needs(sglang: Path) -> None:
    assert missing(sglang, plugin.REQUIREMENTS) == []


def test_the_worker_calls_its_corpus_as_ours_can_be_called(sglang: Path) -> None:
    for call in ast.walk(worker_source(sglang)):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            owner, name = ast.unparse(call.func.value), call.func.attr
            if owner == "self.ngram_corpus":
                signature = inspect.signature(getattr(TokenCacheCorpus, name))
                signature.bind(None, *call.args, **{keyword.arg or "": None for keyword in call.keywords})


def test_the_worker_makes_its_corpus_as_ours_can_be_made(sglang: Path) -> None:
    calls = [node for node in ast.walk(worker_source(sglang)) if isinstance(node, ast.Call)]
    (made,) = [call for call in calls if ast.unparse(call.func) == "NgramCorpus"]
    assert not made.args
    options = {keyword.arg for keyword in made.keywords}
    assert {"draft_token_num", "external_corpus_max_tokens"} <= options and None not in options


def test_our_trees_verify_the_paths_that_its_corpus_would_verify(sglang: Path, tmp_path: Path) -> None:
    """Random trees through the released C++ layout and ours: the same paths, and of each node the same ancestors."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = next(sglang.rglob("ngram_corpus/result.cpp")).parent
    (tmp_path / "wrapper.cpp").write_text(WRAPPER)
    library = tmp_path / "layout.so"
    sources = [str(tmp_path / "wrapper.cpp"), str(folder / "result.cpp")]
    subprocess.run(
        [compiler, "-O1", "-std=c++20", "-shared", "-fPIC", f"-I{folder}", *sources, "-o", str(library)], check=True
    )
    arrange: Callable[..., None] = ctypes.CDLL(str(library)).arrange
    rng = random.Random(7)
    for _ in range(200):
        tree = random_tree(rng, 15)
        nodes = len(tree.tokens) + 1
        leaves = set(range(nodes - 1)) - set(tree.parents)
        paths = [path_to(*tree, leaf) for leaf in leaves]
        flat = np.array([number for path in paths for number in (len(path), *path)], np.int32)
        tokens, mask = np.zeros(nodes, np.int32), np.zeros(nodes * nodes, np.uint8)
        arrange(*(_pointer(flat), len(paths), 9, nodes, _pointer(tokens), _pointer(mask)))
        assert described(tokens, mask) == described(*to_arrays([9], [tree], nodes))


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def described(tokens: np.ndarray, mask: np.ndarray) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Each node as its path by parents and, in order, by the ancestors that it may attend to."""
    rows, ids = mask.reshape(len(tokens), -1), tokens.tolist()
    parents = parents_of(rows)
    return {
        (path_to(ids, parents, node), tuple(ids[other] for other in np.flatnonzero(rows[node])))
        for node in range(len(ids))
    }


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

"""What the plug-in changes in SGLang, on stand-ins for the modules that it touches; a whole server: test_server.py."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from agentspec.backends.engine_plugin.source_contract import Requirement
from agentspec.backends.sglang import plugin
from agentspec.backends.sglang.corpus import TokenCacheCorpus
from agentspec.errors import ConfigurationError
from tests.backends.sglang.conftest import ALONE, NODES, Req

WORKER = "sglang.srt.speculative.ngram_worker"


class NgramCorpus:
    """SGLang's own."""

    def __init__(self, **options: Any) -> None:
        self.options = options


def worker_class(breadth: int = 10) -> Any:
    class NGRAMWorker:
        def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
            self.target_worker, self.finished = target_worker, list[str]()
            made: Any = vars(sys.modules[WORKER])["NgramCorpus"]
            options = {"draft_token_num": NODES, "external_corpus_max_tokens": 100, "max_bfs_breadth": breadth}
            self.ngram_corpus = made(capacity=5, **options)

        def _prepare_draft_tokens(self, batch: Any) -> Any:
            tails = [[*req.origin_input_ids_unpadded, *req.output_ids] for req in batch.reqs]
            return self.ngram_corpus.batch_get([req.rid for req in batch.reqs], tails, [len(tail) for tail in tails])

        def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
            self.finished.append(rid)

    NGRAMWorker.__module__ = WORKER
    return NGRAMWorker


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, patient: None) -> Iterator[SimpleNamespace]:
    """An SGLang that is importable; `hooks` are those that were registered, `parallel` its sizes."""
    (tmp_path / "tokenizer.json").write_text("{}")
    stand_in = SimpleNamespace(hooks={}, worker=worker_class(), parallel=SimpleNamespace(pp_size=1), group=ALONE)
    registry = SimpleNamespace(register=lambda target, hook, kind: stand_in.hooks.update({target: (hook, kind)}))
    contents: dict[str, dict[str, object]] = {
        "sglang": {"__path__": [str(tmp_path)]},
        "sglang.srt": {},
        "sglang.srt.plugins": {},
        "sglang.srt.plugins.hook_registry": {"HookRegistry": registry, "HookType": SimpleNamespace(AROUND="around")},
        "sglang.srt.speculative": {},
        WORKER: {"NgramCorpus": NgramCorpus},
        "sglang.srt.distributed": {},
        "sglang.srt.distributed.parallel_state": {"get_tp_group": lambda: stand_in.group},
        "sglang.srt.runtime_context": {
            "get_parallel": lambda: stand_in.parallel,
            "get_serving": lambda: SimpleNamespace(tokenizer_path=str(tmp_path)),
            "get_model": lambda: SimpleNamespace(model_path="org/model", revision=None),
        },
    }
    for name, content in contents.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    opened: list[Callable[[], None]] = []
    monkeypatch.setattr(plugin, "close_at_exit", opened.append)
    monkeypatch.setattr(plugin, "version", lambda name: "0.99.1")
    monkeypatch.setattr(plugin, "missing", lambda package, requirements: [])
    yield stand_in
    for close in opened:
        close()


def created(sglang: SimpleNamespace, original: Any) -> Any:
    """The class that the registered hook chooses."""
    ((target, (hook, kind)),) = sglang.hooks.items()
    assert (target, kind) == ("sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker", "around")
    return hook(lambda algorithm, server_args: original, "NGRAM", "arguments")


def start(chosen: Any, **adapters: str) -> Any:
    model = SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda: {"hidden_size": 8}), vocab_size=100)
    refs = {name: SimpleNamespace(lora_path=path) for name, path in adapters.items()}
    runner = SimpleNamespace(model_config=model, lora_manager=SimpleNamespace(lora_refs=refs) if refs else None)
    return chosen("arguments", 0, 1, target_worker=SimpleNamespace(model_runner=runner))


def test_the_ngram_worker_drafts_from_our_cache(
    sglang: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AGENTSPEC_CACHE_PATH", str(tmp_path / "cache"))
    monkeypatch.setenv("AGENTSPEC_TENANT", "acme")
    plugin.install()
    with caplog.at_level(logging.INFO, "agentspec"):
        worker = start(created(sglang, sglang.worker))
    assert "tenant 'acme'" in caplog.text
    assert isinstance(worker, sglang.worker)
    assert isinstance(worker.ngram_corpus, TokenCacheCorpus)
    assert vars(sys.modules[WORKER])["NgramCorpus"] is NgramCorpus
    req = Req("a", range(20), range(20))
    req.take([0, 1, 2])
    worker._prepare_draft_tokens(SimpleNamespace(reqs=[req]))
    assert worker.ngram_corpus.flush()
    tokens, mask = worker._prepare_draft_tokens(SimpleNamespace(reqs=[req]))
    assert tokens.tolist() == [2, 3, 4, 5, 6, 7, 8, 9] and mask.sum() == NODES * (NODES + 1) / 2
    req.finish(3)
    worker.note_request_finished(rid="a", natural_stop=True)
    assert worker.finished == ["a"] and worker.ngram_corpus.flush()

    def kept() -> bool:
        again = Req("b", [90], range(20))
        again.take([0])
        for _ in range(2):
            tokens, _ = worker._prepare_draft_tokens(SimpleNamespace(reqs=[again]))
            assert worker.ngram_corpus.flush()
        worker.ngram_corpus.reset()
        return tokens.tolist()[:3] == [0, 1, 2]

    for name, left in (("session=other", True), ("tenant=other", True), ("tenant=acme", False)):
        worker.ngram_corpus.remove_external_corpus(f"agentspec:{name}")
        assert kept() is left


def test_an_adapter_is_known_by_its_files(
    sglang: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """SGLang gives it another id at each start."""
    monkeypatch.setenv("AGENTSPEC_CACHE_PATH", str(tmp_path / "cache"))
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_text("{}")
    plugin.install()
    found = []
    for adapter in ("one", "two", "gone"):
        worker = start(created(sglang, sglang.worker), one=str(tmp_path), two=str(tmp_path))
        req = Req("a", [50], range(20), lora_id=adapter)
        req.take([0, 1, 2])
        for _ in range(2):
            tokens, _ = worker._prepare_draft_tokens(SimpleNamespace(reqs=[req]))
            assert worker.ngram_corpus.flush()
        found.append(tokens.tolist()[:4] == [2, 3, 4, 5])
        req.take(range(3, 20))
        worker.note_request_finished(rid="a", natural_stop=True)
        worker.ngram_corpus.close()
    assert found == [False, True, False]


def test_wrong_settings_end_the_start_of_the_first_rank_which_alone_opens_a_cache(
    sglang: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTSPEC_SGLANG_SALTS", "pepper")
    plugin.install()
    with pytest.raises(ConfigurationError, match="AGENTSPEC_SGLANG_SALTS"):
        start(created(sglang, sglang.worker))
    assert vars(sys.modules[WORKER])["NgramCorpus"] is NgramCorpus
    sglang.group = SimpleNamespace(world_size=2, rank_in_group=1)
    assert start(created(sglang, sglang.worker)).ngram_corpus.flush()


@pytest.mark.parametrize(("breadth", "branches"), [(1, False), (2, True)])
def test_a_breadth_of_one_is_a_chain(sglang: SimpleNamespace, breadth: int, branches: bool) -> None:
    plugin.install()
    worker = start(created(sglang, worker_class(breadth)))
    for name, answer in (("a", [1, 2, 3, 4, 5]), ("b", [1, 2, 8, 9, 7]), ("c", [1])):
        req = Req(name, [50], answer)
        req.output_ids.extend(answer)
        worker._prepare_draft_tokens(SimpleNamespace(reqs=[req]))
        assert worker.ngram_corpus.flush()
        req.finish(len(answer))
        _, mask = worker._prepare_draft_tokens(SimpleNamespace(reqs=[req]))
        worker.note_request_finished(rid=name, natural_stop=True)
    assert (mask.sum() < NODES * (NODES + 1) / 2) == branches


def test_where_it_cannot_draft_sglang_does(sglang: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    sglang.parallel.pp_size = 2
    plugin.install()
    assert created(sglang, sglang.worker) is sglang.worker
    assert created(sglang, NgramCorpus) is NgramCorpus  # another algorithm's
    assert "leaves NGRAM alone" in caplog.text


def test_what_lacks_something_is_left_alone(
    sglang: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AGENTSPEC_SGLANG", "off")
    plugin.install()
    assert sglang.hooks == {} and not caplog.text  # switched off nothing changes
    monkeypatch.delenv("AGENTSPEC_SGLANG")
    asked: list[tuple[Path, tuple[Requirement, ...]]] = []
    monkeypatch.setattr(plugin, "missing", lambda *asks: (asked.append(asks), ["a.b", "c.d (e)"])[1])
    plugin.install()
    assert sglang.hooks == {}
    assert "leaves SGLang alone: SGLang 0.99.1 has no a.b, c.d (e)" in caplog.text
    ((package, requirements),) = asked
    assert requirements is plugin.REQUIREMENTS and package == Path(sys.modules["sglang"].__path__[0])

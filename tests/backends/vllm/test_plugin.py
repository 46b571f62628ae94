"""What the plug-in changes in vLLM, on stand-ins for the few modules that it touches; real ones: test_server.py."""

from __future__ import annotations

import gc
import logging
import shutil
import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import generate_latest

from agentspec.backends.engine_plugin import cache_router
from agentspec.backends.engine_plugin.cache_router import open_router
from agentspec.backends.engine_plugin.request_state import RequestInfo, RequestState
from agentspec.backends.engine_plugin.settings import read_settings
from agentspec.backends.engine_plugin.source_contract import Requirement
from agentspec.backends.openai.metrics import DrafterInfo, parse_drafter
from agentspec.backends.vllm import plugin, proposer
from agentspec.backends.vllm.proposer import SALT, SuffixDecodingProposer
from agentspec.backends.vllm.runner_v2 import plugin as runner_v2
from agentspec.backends.vllm.runner_v2 import retrieval
from agentspec.errors import ConfigurationError
from agentspec.version import __version__
from tests.backends.conftest import stored
from tests.backends.vllm.conftest import TEXT, Client


@dataclass
class NewRequestData:
    req_id: str

    @classmethod
    def from_request(cls, request: Any, block_ids: Any = None) -> NewRequestData:
        return cls(request.request_id)


class GPUModelRunner:
    def __init__(self, drafter: object) -> None:
        self.drafter, self.input_batch = drafter, SimpleNamespace()

    def _update_states(self, scheduler_output: object) -> str:
        return "deferred"

    def shutdown(self) -> None:
        """Frees what it holds."""


class RunnerV2:
    def __init__(self, speculator: object) -> None:
        self.speculator: object = speculator

    def add_requests(self, scheduler_output: object) -> None:
        """Handles them."""

    finish_requests = add_requests

    def shutdown(self) -> None:
        self.speculator = None


class WorkerBase:
    """Whose methods `collective_rpc` calls by name."""


class Speculator:
    num_speculative_steps, max_num_reqs, max_model_len = 4, 2, 64

    def __init__(self, vllm_config: object, device: object, req_states: object) -> None:
        self.device = device


class PrometheusStatLogger:
    def log_engine_initialized(self) -> None:
        """Logs."""


class EngineArgs:
    def __init__(self, speculative_config: dict[str, Any] | None) -> None:
        self.speculative_config = speculative_config

    def create_speculative_config(self, target: object) -> dict[str, Any] | None:
        return self.speculative_config


class EngineCore:
    model_executor = SimpleNamespace(collective_rpc=lambda method: method(WorkerBase()))

    def reset_prefix_cache(self, how: object) -> str:
        return "reset_prefix_cache"

    def set_weight_version(self, version: object) -> str:
        return "set_weight_version"


class ModelSpeculator:
    """One with a model of its own."""

    device, draft_logits = torch.device("cpu"), None
    num_speculative_steps, max_num_reqs, max_model_len = 4, 2, 64

    def propose(self, input_batch: Any, *states: object, **more: object) -> torch.Tensor:
        return torch.full((input_batch.num_reqs, 4), 7)


SUFFIX = SimpleNamespace(suffix_decoding_min_token_prob=0.1, method="ngram", rejection_sample_method="standard")
SPECULATORS = "vllm.v1.worker.gpu.spec_decode"
NGRAM, SAMPLER = f"{SPECULATORS}.ngram.speculator", f"{SPECULATORS}.rejection_sampler"
CONTENTS: dict[str, dict[str, object]] = {
    "vllm": {},
    "vllm.config": {},
    "vllm.config.speculative": {"has_arctic_inference": lambda: False},
    "vllm.engine": {},
    "vllm.engine.arg_utils": {"EngineArgs": EngineArgs},
    "vllm.v1": {},
    "vllm.v1.engine": {},
    "vllm.v1.engine.core": {"EngineCore": EngineCore},
    "vllm.v1.spec_decode": {},
    "vllm.v1.spec_decode.suffix_decoding": {"SuffixDecodingProposer": object},
    "vllm.v1.core": {},
    "vllm.v1.core.sched": {},
    "vllm.v1.core.sched.output": {"NewRequestData": NewRequestData},
    "vllm.v1.metrics": {},
    "vllm.v1.metrics.loggers": {"PrometheusStatLogger": PrometheusStatLogger},
    "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: True)},
    "vllm.v1.sample": {},
    "vllm.v1.sample.rejection_sampler": {
        "torch": torch,
        "expand_batch_to_tokens": lambda x, ends, count: torch.zeros(count),
    },
    "vllm.v1.worker": {},
    "vllm.v1.worker.worker_base": {"WorkerBase": WorkerBase},
    "vllm.v1.worker.gpu": {},
    "vllm.v1.worker.gpu.model_runner": {"GPUModelRunner": RunnerV2},
    "vllm.v1.worker.gpu.sample": {},
    "vllm.v1.worker.gpu.sample.gumbel": {"gumbel_sample": None},
    SPECULATORS: {"init_speculator": lambda config, device, req_states: config.made},
    f"{SPECULATORS}.speculator": {"DraftModelSpeculator": ModelSpeculator},
    SAMPLER: {"rejection_sample": None},
    f"{SPECULATORS}.ngram": {},
    NGRAM: {"NgramGPUSpeculator": Speculator},
    "vllm.v1.worker.gpu_model_runner": {"GPUModelRunner": GPUModelRunner, "SuffixDecodingProposer": object},
}


V2_REQUIREMENTS = (*runner_v2.REQUIREMENTS, *runner_v2.HYBRID_REQUIREMENTS)
STANDARD = SimpleNamespace(rejection_sample_method="standard", method="eagle3")


def source(requirements: Iterable[Requirement], folder: Path) -> None:
    """Write modules that offer what is required."""
    modules: dict[str, dict[str, list[str]]] = {}
    for module, name, parts in requirements:
        owner, _, method = name.partition(".")
        lines = modules.setdefault(module, {}).setdefault(owner, ["    one: object\n"])
        lines += (
            [f"    def {method}(self, {', '.join(parts)}): ...\n"]
            if method
            else [f"    {part}: object\n" for part in parts]
        )
    for module, classes in modules.items():
        file = folder.joinpath(*module.split(".")[1:]).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f"class {name}:\n{''.join(lines)}" for name, lines in classes.items()))


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, ModuleType]]:
    """A vLLM that is not installed but importable."""
    source([*plugin.REQUIREMENTS, *V2_REQUIREMENTS, plugin.METRICS], tmp_path / "source")
    modules = {name: ModuleType(name) for name in CONTENTS}
    for name, module in modules.items():
        vars(module).update(CONTENTS[name])
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
        monkeypatch.setitem(sys.modules, name, module)
    patched = [(NewRequestData, "from_request"), (GPUModelRunner, "_update_states"), (GPUModelRunner, "shutdown")]
    patched += [(RunnerV2, "add_requests"), (RunnerV2, "finish_requests"), (EngineArgs, "create_speculative_config")]
    patched += [(RunnerV2, "shutdown"), (EngineCore, "reset_prefix_cache"), (EngineCore, "set_weight_version")]
    for owner, name in [*patched, (PrometheusStatLogger, "log_engine_initialized")]:
        monkeypatch.setattr(owner, name, vars(owner)[name])
    monkeypatch.setattr(plugin, "_installed", False)
    monkeypatch.setattr(modules["vllm"], "__path__", [str(tmp_path / "source")], raising=False)
    monkeypatch.setattr(plugin, "version", lambda name: "0.99.1")
    ours = logging.getLogger("agentspec")
    parent = ours.parent
    yield modules
    ours.parent = parent


def test_ours_takes_the_place_of_the_suffix_method(vllm: dict[str, ModuleType]) -> None:
    plugin.install()
    plugin.install()
    assert vllm["vllm.config.speculative"].has_arctic_inference()
    for name in ("vllm.v1.spec_decode.suffix_decoding", "vllm.v1.worker.gpu_model_runner"):
        assert vllm[name].SuffixDecodingProposer is SuffixDecodingProposer
    assert vllm[NGRAM].NgramGPUSpeculator is not Speculator


def test_our_records_go_to_handlers_that_vllm_sets_after_its_plug_ins(vllm: dict[str, ModuleType]) -> None:
    plugin.install()
    theirs, said = logging.getLogger("vllm"), list[logging.LogRecord]()
    handler = logging.Handler()
    handler.emit = said.append  # type: ignore[method-assign]
    theirs.addHandler(handler)
    logging.getLogger(plugin.__name__).warning("drafts")
    theirs.removeHandler(handler)
    assert [record.msg for record in said] == ["drafts"]


def test_new_requests_carry_their_salt(vllm: dict[str, ModuleType]) -> None:
    plugin.install()
    data = NewRequestData.from_request(SimpleNamespace(request_id="a", cache_salt="pepper"), block_ids=())
    assert (data.req_id, getattr(data, SALT)) == ("a", "pepper")


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("AGENTSPEC_CACHE__MEMORY_BYTES", "much", "AGENTSPEC_CACHE__MEMORY_BYTES"),
        ("AGENTSPEC_VLLM_V2", "maybe", "AGENTSPEC_VLLM_V2 must be on or off"),
        ("AGENTSPEC_VLLM_STRICT", "maybe", "AGENTSPEC_VLLM_STRICT must be on or off"),
        ("AGENTSPEC_VLLM", "off", ""),
    ],
)
def test_wrong_settings_end_the_start_and_switched_off_nothing_changes(
    vllm: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigurationError, match=message) if message else nullcontext():
        plugin.install()
        assert vllm["vllm.config.speculative"].has_arctic_inference() is False
        assert vllm["vllm.v1.spec_decode.suffix_decoding"].SuffixDecodingProposer is object
    assert (vllm[NGRAM].NgramGPUSpeculator is Speculator) is not variable.startswith("AGENTSPEC_CACHE")


def test_the_second_runner_can_be_left_alone(vllm: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTSPEC_VLLM_V2", "off")
    plugin.install()
    assert vllm["vllm.config.speculative"].has_arctic_inference() and vllm[NGRAM].NgramGPUSpeculator is Speculator


def test_a_speculator_for_the_second_runner(vllm: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrieval, "drafts_here", lambda config: False)
    plugin.install()
    parallel = SimpleNamespace(prefill_context_parallel_size=1)
    config = SimpleNamespace(parallel_config=parallel, speculative_config=STANDARD)
    made = vllm[NGRAM].NgramGPUSpeculator(config, torch.device("cpu"), None)
    assert isinstance(made, Speculator)
    parallel.prefill_context_parallel_size = 2
    theirs = vllm[NGRAM].NgramGPUSpeculator(SimpleNamespace(parallel_config=parallel), torch.device("cpu"), None)
    assert type(theirs) is Speculator


@pytest.mark.parametrize("switch", ["on", "off"])
def test_ours_beside_a_model_where_asked_for(
    vllm: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, switch: str
) -> None:
    monkeypatch.setenv("AGENTSPEC_VLLM_HYBRID", switch)
    monkeypatch.setattr(retrieval, "drafts_here", lambda config: False)
    named = vllm["vllm.v1.worker.gpu.model_runner"]
    monkeypatch.setattr(named, "init_speculator", vllm[SPECULATORS].init_speculator, raising=False)
    plugin.install()
    parallel = SimpleNamespace(prefill_context_parallel_size=1, tensor_parallel_size=1, data_parallel_size=1)
    other = SimpleNamespace(made=Speculator(None, None, None))
    assert named.init_speculator(other, None, None) is other.made and not hasattr(other.made, runner_v2.BESIDE)
    config = SimpleNamespace(made=ModelSpeculator(), parallel_config=parallel, speculative_config=STANDARD)
    made = named.init_speculator(config, None, None)
    assert made is config.made and hasattr(made, runner_v2.BESIDE) == (switch == "on")


@pytest.mark.parametrize(
    ("changed", "seeded", "said"),
    [
        ({}, True, ""),
        ({"AGENTSPEC_VLLM_STRICT": "off"}, True, ""),
        ({"method": "block"}, False, "rejection_sample_method is 'block'"),
        ({"watermark": object()}, False, "answers are watermarked"),
        ({"logits": torch.zeros(1)}, False, "its drafter samples"),
        ({"lacks": "sample/gumbel.py"}, False, "it has no vllm.v1.worker.gpu.sample.gumbel"),
    ],
)
def test_requests_with_a_seed_have_drafts_only_where_these_change_no_token(
    vllm: dict[str, ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    changed: dict[str, Any],
    seeded: bool,
    said: str,
) -> None:
    monkeypatch.setenv("AGENTSPEC_VLLM_STRICT", changed.get("AGENTSPEC_VLLM_STRICT", "on"))
    if "lacks" in changed:
        (runner_v2.package() / "v1/worker/gpu" / changed["lacks"]).unlink()
    method = SimpleNamespace(rejection_sample_method=changed.get("method", "standard"))
    config = SimpleNamespace(speculative_config=method, watermark_config=changed.get("watermark"))
    assert runner_v2.verify_strictly(config, changed.get("logits")) is seeded
    assert said in caplog.text and bool(caplog.text) is not seeded
    ours = vllm[SAMPLER].rejection_sample
    assert (ours is not None and ours.strict) is (changed == {})


@pytest.mark.parametrize("lacking", [*plugin.REQUIREMENTS, *runner_v2.REQUIREMENTS], ids=lambda lacking: lacking.name)
def test_what_lacks_something_is_left_alone(
    vllm: dict[str, ModuleType],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    lacking: Requirement,
) -> None:
    shutil.rmtree(tmp_path / "source")
    first = lacking in plugin.REQUIREMENTS
    needed = plugin.REQUIREMENTS if first else runner_v2.REQUIREMENTS
    there = [one for one in needed if lacking.name not in (one.name, one.name.partition(".")[0])]
    source([*there, *(() if first else plugin.REQUIREMENTS)], tmp_path / "source")
    handler = logging.StreamHandler(sys.stdout)
    logging.getLogger("vllm").addHandler(handler)
    for _ in range(2):
        plugin.install()
    logging.getLogger("vllm").removeHandler(handler)
    assert vllm["vllm.config.speculative"].has_arctic_inference() is not first  # which has no need of the second
    assert (vllm["vllm.v1.spec_decode.suffix_decoding"].SuffixDecodingProposer is object) is first
    assert lacking in plugin.REQUIREMENTS or vllm[NGRAM].NgramGPUSpeculator is Speculator
    written = capsys.readouterr().out
    assert written.count("vLLM 0.99.1 has no") == 1 and lacking.module in written


def test_runners_tell_their_proposer(vllm: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proposer, "drafts_here", lambda config: False)
    parallel, shape = SimpleNamespace(distributed_executor_backend="mp"), SimpleNamespace(max_model_len=100)
    config = SimpleNamespace(parallel_config=parallel, model_config=shape)
    proposers = [SuffixDecodingProposer(config) for _ in range(2)]  # the second must not wrap anew
    hooks: list[str] = []
    for hook in ("finished", "scheduled"):
        monkeypatch.setattr(proposers[1], hook, lambda output, batch, hook=hook: hooks.append(hook))
    for drafter in (proposers[1], object()):
        assert GPUModelRunner(drafter)._update_states("output") == "deferred"
    assert hooks == ["finished", "scheduled"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), min_size=1))
def test_each_token_is_verified_with_its_request_s_temperature(
    vllm: dict[str, ModuleType], rows: list[tuple[int, int]]
) -> None:
    proposer.keep_temperatures()
    expand = vllm["vllm.v1.sample.rejection_sampler"].expand_batch_to_tokens
    values, counts = (torch.tensor(column) for column in zip(*rows, strict=True))
    expanded = expand(values.float(), counts.cumsum(0), int(counts.sum()), replace_from=0, replace_to=1)
    assert expanded.tolist() == [float(value or 1) for value, count in rows for _ in range(count)]


def launched(stages: int = 1) -> Any:
    parallel = SimpleNamespace(distributed_executor_backend="external_launcher", pipeline_parallel_size=stages)
    return SimpleNamespace(parallel_config=parallel, model_config=SimpleNamespace(max_model_len=100))


def test_stages_with_schedulers_of_their_own_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="pipeline_parallel_size=1"):
        proposer.drafts_here(launched(2))


def test_ranks_with_schedulers_of_their_own_get_the_drafts_of_the_first(
    vllm: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafted: list[Any] = []

    def drafts(rank: int, given: list[list[int]]) -> Any:
        def broadcast(made: Any, src: int) -> Any:
            drafted.extend([made] if rank == src else [])
            return drafted[-1]

        group = SimpleNamespace(rank_in_group=rank, world_size=2, broadcast_object=broadcast)
        monkeypatch.setattr(proposer, "tensor_group", lambda: group)
        monkeypatch.setattr(proposer, "open_drafter", lambda config: None)
        one = SuffixDecodingProposer(launched())
        monkeypatch.setattr(one, "_drafts", lambda *_: given)
        return one.propose(4, None, [[1], [2]])

    assert drafts(0, [[7], [8, 9]]) == drafts(1, [[], []]) == [[7], [8, 9]]


def test_engines_of_a_program_that_says_nothing_speculate_as_the_operator_says(
    vllm: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTSPEC_VLLM_SPECULATIVE_CONFIG", '{"method": "suffix", "num_speculative_tokens": 5}')
    plugin.install()
    ours, none = {"method": "suffix", "num_speculative_tokens": 5}, {"method": "eagle"}
    assert [EngineArgs(given).create_speculative_config("model") for given in (None, none)] == [ours, none]
    monkeypatch.setenv("AGENTSPEC_VLLM_SPECULATIVE_CONFIG", "[5]")
    with pytest.raises(ConfigurationError, match="AGENTSPEC_VLLM_SPECULATIVE_CONFIG must be a JSON object"):
        monkeypatch.setattr(plugin, "_installed", False)
        plugin.install()


@pytest.mark.parametrize("reported", ["reset_prefix_cache", "set_weight_version"])
def test_what_old_policies_wrote_is_forgotten(
    vllm: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, reported: str
) -> None:
    """An update may be reported more than once, and tokens of the present policy and the one before are drafted."""
    monkeypatch.setenv("AGENTSPEC_POLICIES", "1")
    clock = [0.0]
    monkeypatch.setattr("time.time", lambda: clock[0])
    plugin.install()
    router = open_router(read_settings("VLLM"), model("m"), "here")
    engine = EngineCore()

    def wrote(token: int) -> None:
        with router.open(RequestState(1, RequestInfo()), np.array([1], np.int32)) as request:
            request.extend(np.array([token, token], np.int32))

    kept = []
    for policy in range(4):
        clock[0] += 1
        wrote(policy)
        clock[0] += 1
        kept.append(stored(router._cache, router._namespaces["default"]))
        assert getattr(engine, reported)("v") == reported and engine.reset_prefix_cache("again")
    assert kept == [[[0, 0]], [[0, 0], [1, 1]], [[1, 1], [2, 2]], [[2, 2], [3, 3]]]
    router.close()
    monkeypatch.setenv("AGENTSPEC_CACHE_PATH", "/folder")
    with pytest.raises(ConfigurationError, match="AGENTSPEC_POLICIES"):
        open_router(read_settings("VLLM"), model("m"), "here")


def model(folder: str, **config: object) -> Any:
    return SimpleNamespace(
        hf_config=SimpleNamespace(to_dict=lambda: {"hidden_size": 8, "_name_or_path": folder, **config}),
        tokenizer=folder,
        tokenizer_revision=None,
    )


def test_replicas_with_other_folder_names_share_and_other_models_and_tenants_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, patient: None
) -> None:
    """By the configuration of a server alone: its cache is a folder that all of these open one after the other."""
    monkeypatch.setenv("AGENTSPEC_CACHE_PATH", str(tmp_path / "cache"))
    files = [("a", "tokenizer.json", "{}"), ("b", "tokenizer.json", "{}"), ("c", "tokenizer.json", "{1}")]
    files += [("d", "tekken.json", "{}"), ("e", "tokenizer.model", "x"), ("f", "tokenizer.model", "x")]
    for name, file, text in files:
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(text)

    def drafted(folder: str, tenant: str = "acme", namespace: str = "", **config: object) -> bool:
        """Whether the server drafts an output of the past, which it then records."""
        monkeypatch.setenv("AGENTSPEC_TENANT", tenant)
        monkeypatch.setenv("AGENTSPEC_NAMESPACE", namespace)
        served = model(folder, **config)
        served.get_vocab_size = lambda: 1000
        drafter = proposer.open_drafter(SimpleNamespace(model_config=served, speculative_config=SUFFIX))
        client = Client(drafter, np.arange(8, dtype=np.int32))
        assert drafter.flush()
        (chain,) = drafter.propose([client.turn(TEXT[:3], 4)])
        drafter.propose([client.turn(TEXT[3:], 0)])
        drafter.end(client.state)
        assert drafter.flush()
        for _ in range(2):
            drafter.close()
        return bool(chain.tokens)

    with caplog.at_level(logging.INFO, "agentspec"):
        assert not drafted(str(tmp_path / "a"))
    assert "for this server, in the first model runner: " in caplog.text and "tenant 'acme'" in caplog.text
    assert drafted(str(tmp_path / "a")) and drafted(str(tmp_path / "b"))
    assert not drafted(str(tmp_path / "c")) and not drafted("org/name")
    assert not drafted(str(tmp_path / "a"), layers=2) and not drafted(str(tmp_path / "a"), "other")
    assert drafted(str(tmp_path / "d"))  # the same content: tokens have the same ids
    assert not drafted(str(tmp_path / "e")) and drafted(str(tmp_path / "f"))
    named = {"namespace": "qwen", "quantization_config": "fp8"}
    assert not drafted(str(tmp_path / "a"), namespace="qwen") and drafted(str(tmp_path / "b"), **named)
    assert not drafted(str(tmp_path / "c"), **named) and not drafted(str(tmp_path / "a"), "other", **named)


def test_workers_forget_what_only_memory_holds(
    vllm: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, patient: None
) -> None:
    """Any worker, also of a rank that does not draft."""
    monkeypatch.delattr(WorkerBase, "agentspec_forget", raising=False)
    proposer.listen_to_scheduler()
    worker: Any = WorkerBase()
    assert worker.agentspec_forget(tenant="default") == 0
    served = model(str(tmp_path))
    served.get_vocab_size = lambda: 1000
    drafter = proposer.open_drafter(SimpleNamespace(model_config=served, speculative_config=SUFFIX))
    client = Client(drafter, TEXT[:1])
    drafter.propose([client.turn(TEXT, 4)])
    drafter.end(client.state)
    assert drafter.flush() and worker.agentspec_forget(session="other") == 0
    assert worker.agentspec_forget(tenant="default") == 1 == 1 + worker.agentspec_forget(tenant="default")
    drafter.close()
    assert worker.agentspec_forget(tenant="default") == 0


@pytest.mark.parametrize("second", [False, True])
def test_an_engine_that_ends_before_its_process_leaves_nothing_behind(
    vllm: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, second: bool
) -> None:
    """A program may make another one: neither memory of the device nor the cache are kept until the program ends."""
    for module in (proposer, retrieval):
        monkeypatch.setattr(module, "drafts_here", lambda config: True)
    plugin.install()
    served = model(str(tmp_path))
    served.get_vocab_size, served.max_model_len = lambda: 1000, 64
    parallel = SimpleNamespace(prefill_context_parallel_size=1, distributed_executor_backend="mp")
    config = SimpleNamespace(model_config=served, parallel_config=parallel, speculative_config=SUFFIX)
    made = (vllm[NGRAM].NgramGPUSpeculator if second else lambda config, *_: SuffixDecodingProposer(config))(
        config, torch.device("cpu"), None
    )
    runner: Any = (RunnerV2 if second else GPUModelRunner)(made)
    left = [weakref.ref(made), weakref.ref(cache_router._open[-1])]
    runner.shutdown()
    del runner, made
    gc.collect()
    assert [one() for one in left] == [None, None]


def speculative(method: str, model: str | None = None) -> SimpleNamespace:
    return SimpleNamespace(method=method, model=model)


@pytest.mark.parametrize(
    ("config", "took_over", "drafter"),
    [
        (None, (True, False), "none"),
        (speculative("suffix"), (True, False), "agentspec"),
        (speculative("suffix"), (False, False), "arctic"),
        (speculative("custom_class", "theirs.Proposer"), (True, False), "custom_class"),
        (speculative("ngram"), (True, False), "ngram"),
        (speculative("eagle3", "some/model"), (True, True), "eagle3"),
        (speculative("ngram_gpu"), (True, True), "agentspec"),  # the second runner gives its n-gram method to ours
    ],
)
def test_who_drafts(config: SimpleNamespace | None, took_over: tuple[bool, bool], drafter: str) -> None:
    assert plugin.drafter_of(config, took_over=took_over[0], took_over_v2=took_over[1]) == drafter


def test_what_is_published_is_what_the_upstream_backend_reads() -> None:
    for _ in range(2):
        plugin.publish(speculative("suffix"), took_over=True)
    assert parse_drafter(generate_latest().decode()) == DrafterInfo("agentspec", "suffix", __version__)

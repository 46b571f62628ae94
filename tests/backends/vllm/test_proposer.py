"""The proposer, driven as vLLM's model runner drives it, without the server."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from agentspec.backends.engine_plugin import drafter
from agentspec.backends.engine_plugin.drafter import ServerDrafter
from agentspec.backends.vllm import proposer
from agentspec.backends.vllm.proposer import SALT, SuffixDecodingProposer
from agentspec.cache import SuffixCache
from agentspec.cache.tokens import Tokens
from tests.backends.conftest import followed_requests, opening, stored

MOST, MAX_LENGTH, EOS = 6, 200, 999
TEXT = np.arange(100, 160, dtype=np.int32)
OTHER = np.arange(700, 760, dtype=np.int32)
SAME = np.array([1, 2], dtype=np.int32)


@dataclass
class Server:
    """The rows of a batch as vLLM keeps them: a token matrix, lengths, ids."""

    token_ids_cpu: np.ndarray = field(default_factory=lambda: np.zeros((8, MAX_LENGTH + 50), dtype=np.int32))
    num_tokens_no_spec: np.ndarray = field(default_factory=lambda: np.zeros(8, dtype=np.int32))
    req_ids: list[str] = field(default_factory=list)

    @property
    def req_id_to_index(self) -> dict[str, int]:
        return {name: row for row, name in enumerate(self.req_ids)}

    def add(self, name: str, tokens: Tokens) -> None:
        row = len(self.req_ids)
        self.req_ids.append(name)
        self.token_ids_cpu[row, : len(tokens)] = tokens
        self.num_tokens_no_spec[row] = len(tokens)

    def remove(self, name: str) -> Tokens:
        """The last row takes the place that becomes free."""
        row, last = self.req_ids.index(name), len(self.req_ids) - 1
        tokens = self.token_ids_cpu[row, : self.num_tokens_no_spec[row]].copy()
        self.token_ids_cpu[row] = self.token_ids_cpu[last]
        self.num_tokens_no_spec[row] = self.num_tokens_no_spec[last]
        self.req_ids[row] = self.req_ids[last]
        self.req_ids.pop()
        return tokens

    def sample(self, tokens: dict[str, list[int]]) -> list[list[int]]:
        """The step's new tokens by row, written down as the runner does before it asks for drafts."""
        for name, new in tokens.items():
            row = self.req_ids.index(name)
            length = self.num_tokens_no_spec[row]
            self.token_ids_cpu[row, length : length + len(new)] = new
            self.num_tokens_no_spec[row] += len(new)
        return [tokens.get(name, []) for name in self.req_ids]


class GPUModelRunner:
    """The part of vLLM's class that ours listens to."""

    def __init__(self, server: Server, drafter: SuffixDecodingProposer) -> None:
        self.input_batch, self.drafter = server, drafter

    def _update_states(self, output: Any) -> None:
        for name in output.finished_req_ids:
            self.input_batch.remove(name)
        for begun in output.scheduled_new_reqs:
            self.input_batch.add(begun.req_id, np.array(begun.prompt_token_ids, dtype=np.int32))

    def shutdown(self) -> None:
        """Frees what it holds."""


def config() -> Any:
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=MOST),
        model_config=SimpleNamespace(max_model_len=MAX_LENGTH, enable_prompt_embeds=False),
        parallel_config=SimpleNamespace(distributed_executor_backend="mp"),
    )


@dataclass
class Bench:
    """A proposer with the cache and drafter behind it."""

    cache: SuffixCache
    drafter: ServerDrafter
    server: Server = field(default_factory=Server)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, patient: None) -> Iterator[Bench]:
    with SuffixCache.open() as cache:
        bench = Bench(cache, ServerDrafter(opening(cache, pepper="acme"), 1000, chains=True))
        monkeypatch.setattr(proposer, "open_drafter", lambda config: bench.drafter)
        monkeypatch.setattr(proposer, "drafts_here", lambda config: True)
        monkeypatch.setattr(proposer, "keep_temperatures", lambda: None)
        for name in ("gpu_model_runner", "worker_base"):
            monkeypatch.setitem(sys.modules, f"vllm.v1.worker.{name}", ModuleType(name))
        sys.modules["vllm.v1.worker.worker_base"].WorkerBase = type("WorkerBase", (), {})  # type: ignore[attr-defined]
        listening = type("GPUModelRunner", (GPUModelRunner,), {})  # to be patched
        sys.modules["vllm.v1.worker.gpu_model_runner"].GPUModelRunner = listening  # type: ignore[attr-defined]
        yield bench
        bench.drafter.close()


def new(
    name: str, prompt: Tokens, salt: str | None = None, stop: Sequence[str] = (), most: int = 100, **extra: object
) -> Any:
    request = SimpleNamespace(
        req_id=name,
        prompt_token_ids=prompt.tolist(),
        prompt_embeds=None,
        lora_request=None,
        sampling_params=SimpleNamespace(
            extra_args=extra,
            eos_token_id=EOS,
            stop=[*stop],
            stop_token_ids=[],
            max_tokens=most,
            seed=1,
            temperature=0.0,
        ),
    )
    setattr(request, SALT, salt)
    return request


def scheduled(*begun: Any, finished: tuple[str, ...] = (), **more: object) -> Any:
    return SimpleNamespace(scheduled_new_reqs=list(begun), finished_req_ids=set(finished), **more)


class Runner:
    """Drives the proposer as vLLM's model runner does."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.proposer = bench, SuffixDecodingProposer(config())
        listening: Any = sys.modules["vllm.v1.worker.gpu_model_runner"]
        self.vllm = listening.GPUModelRunner(bench.server, self.proposer)

    def begin(
        self, name: str, prompt: Tokens, salt: str | None = None, stop: Sequence[str] = ("!",), **extra: Any
    ) -> None:
        self.vllm._update_states(scheduled(new(name, prompt, salt, stop, **extra)))
        self.bench.drafter.flush()

    def step(self, most: int = MOST, /, **tokens: list[int]) -> dict[str, list[int]]:
        server = self.bench.server
        drafts = self.proposer.propose(most, server, server.sample(tokens), slot_mappings=None)
        self.bench.drafter.flush()
        return dict(zip(server.req_ids, drafts, strict=True))

    def finish(self, name: str) -> None:
        self.vllm._update_states(scheduled(finished=(name,)))
        self.bench.drafter.flush()


@pytest.fixture
def runner(bench: Bench) -> Runner:
    return Runner(bench)


def outputs(bench: Bench) -> list[list[int]]:
    return stored(bench.cache)


def test_rows_that_move_keep_their_requests(runner: Runner, bench: Bench) -> None:
    names = ("a", "b", "c")
    texts = {name: np.arange(200 + 60 * i, 250 + 60 * i, dtype=np.int32) for i, name in enumerate(names)}
    for name in names:
        runner.begin(name, texts[name])
    runner.step(**{name: texts[name][:3].tolist() for name in names})
    runner.finish("a")
    drafts = runner.step(**{name: texts[name][3:5].tolist() for name in ("b", "c")})
    for name in ("b", "c"):
        assert drafts[name]
        assert drafts[name] == texts[name][5 : 5 + len(drafts[name])].tolist()
    runner.finish("b")
    runner.finish("c")
    runner.step()
    assert bench.cache.stats().sequences == 3
    assert outputs(bench) == [texts["a"][:3].tolist(), texts["b"][:5].tolist(), texts["c"][:5].tolist()]


def test_no_drafts_where_the_scheduler_wants_none_or_the_prompt_is_not_read(runner: Runner, bench: Bench) -> None:
    runner.begin("a", TEXT)
    assert [runner.step(), runner.step()] == [{"a": []}] * 2
    for at, skip in ((0, {}), (4, {"skip_drafts": True}), (8, {"skip_drafts": False})):
        runner.proposer.scheduled(scheduled(**skip), bench.server)
        drafts = runner.step(a=TEXT[at : at + 4].tolist())["a"]
        assert drafts == ([] if skip.get("skip_drafts") else TEXT[at + 4 : at + 4 + len(drafts)].tolist())
        assert bool(drafts) is not skip.get("skip_drafts", False)
    runner.finish("a")
    assert outputs(bench) == [TEXT[:12].tolist()]


def test_drafts_stop_where_the_model_does(runner: Runner) -> None:
    prompt = np.tile(TEXT, 4)[: MAX_LENGTH - 5]
    following = np.tile(TEXT, 4)[len(prompt) :]
    runner.begin("a", prompt)
    for at in range(4):
        assert len(runner.step(a=[int(following[at])])["a"]) <= max(0, MAX_LENGTH - (len(prompt) + at + 1) - 1)


def test_a_preempted_request_goes_on(runner: Runner, bench: Bench) -> None:
    runner.begin("a", TEXT)
    runner.step(a=TEXT[:3].tolist())
    tokens = bench.server.remove("a")
    runner.step()
    bench.server.add("a", tokens)
    assert runner.step(a=TEXT[3:5].tolist())["a"][:1] == [int(TEXT[5])]


def test_output_that_a_failed_load_of_blocks_has_discarded_counts_once(runner: Runner, bench: Bench) -> None:
    """vLLM computes the blocks itself then, drops what was sampled with them missing, and shortens the row."""
    runner.begin("a", TEXT[:10])
    runner.step(a=[EOS])
    bench.server.num_tokens_no_spec[0] -= 1
    runner.step(a=[1, 2, 3])
    runner.step(a=[4, EOS])
    runner.finish("a")
    assert [text[-5:] for text in outputs(bench)] == [[1, 2, 3, 4, EOS]]


@given(st.data())
def test_tokens_of_one_tenant_are_never_drafted_for_another(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, data: st.DataObject
) -> None:
    """Rows of several salts come, go and move in one batch; searches end in their round or behind it."""
    tenants = {None: range(100, 110), "pepper": range(200, 210), "secret": range(300, 310), "?": range(400, 410)}
    texts = {salt: st.lists(st.sampled_from(tokens), min_size=1, max_size=12) for salt, tokens in tenants.items()}
    salts: dict[str, str | None] = {}
    try:
        for number in range(data.draw(st.integers(5, 20))):
            act = data.draw(st.sampled_from(["begin", "step", "step", "finish"]))
            if act == "begin" and len(salts) < 5:
                salt = data.draw(st.sampled_from(list(tenants)))
                runner.begin(f"r{number}", np.array(data.draw(texts[salt]), dtype=np.int32), salt)
                salts[f"r{number}"] = salt
            elif act == "step":
                monkeypatch.setattr(drafter, "PATIENCE", data.draw(st.sampled_from([0.0, 60.0])))
                found = runner.step(**{name: data.draw(texts[salt])[:4] for name, salt in salts.items()})
                assert all(set(found[name]) <= set(tenants[salt]) for name, salt in salts.items())
            elif salts:
                runner.finish(name := data.draw(st.sampled_from(sorted(salts))))
                del salts[name]
    finally:  # also where an example ends in a draw: the next one begins without requests
        for name in salts:
            runner.finish(name)
        assert not runner.proposer._states


def test_what_is_sampled_behind_the_end_is_no_output(bench: Bench) -> None:
    runner = Runner(bench)
    runner.begin("a", TEXT)
    assert runner.step(a=[100, 101, EOS, 102, 103]) == {"a": []}
    runner.finish("a")
    runner.begin("b", TEXT[:5])
    runner.step(b=[7] * 60)
    assert runner.step(b=[7] * 60)["b"] == []
    runner.finish("b")
    assert outputs(bench) == [[7] * 100, [100, 101, EOS]]


def test_an_output_that_is_whole_is_kept_though_the_server_stops_at_once(runner: Runner, bench: Bench) -> None:
    for name in ("a", "b"):
        runner.begin(name, TEXT)
    runner.step(a=[100, EOS], b=[100])
    bench.drafter.close()
    assert outputs(bench) == [[100, EOS]]


def answer(runner: Runner, name: str, text: list[int], **given: Any) -> list[int]:
    """Have a request write this text; the tokens drafted for it, where its target verified them."""
    runner.begin(name, np.array([1], dtype=np.int32), **given)
    fresh, at, drafted = text[:2], 0, list[int]()
    while fresh:
        at += len(fresh)
        (draft,) = [chain for one, chain in runner.step(**{name: fresh}).items() if one == name]
        drafted += draft
        right = [token == next_ for token, next_ in zip(draft, text[at:], strict=False)]
        fresh = text[at : at + 1 + (right.index(False) if False in right else len(right))]
    runner.finish(name)
    return drafted


def test_drafts_are_counted_by_source_and_tenant(runner: Runner, bench: Bench) -> None:
    def counted(name: str, source: str, tenant: str) -> float:
        value = REGISTRY.get_sample_value(
            f"agentspec_drafter_{name}_tokens_total", {"source": source, "tenant": tenant}
        )
        return value or 0.0

    rows = [("cache", "default"), ("prediction", "default"), ("cache", "acme"), ("cache", "private")]
    before = {(name, *row): counted(name, *row) for name in ("draft", "accepted") for row in rows}
    predicted = 0
    for number in range(3):
        answer(runner, f"a{number}", TEXT.tolist())
        answer(runner, f"b{number}", TEXT.tolist(), salt="pepper")
        answer(runner, f"c{number}", TEXT.tolist() * 2, salt="x")
        predicted += len(answer(runner, f"d{number}", OTHER.tolist(), agentspec_prediction=OTHER.tolist()))
    found = {key: counted(*key) - value for key, value in before.items()}
    assert all(found["draft", *row] >= found["accepted", *row] > 20 for row in rows)
    assert found["draft", "prediction", "default"] == predicted
    stats = bench.cache.stats()
    assert stats.drafted == sum(found["draft", *row] for row in rows)
    assert stats.accepted == sum(found["accepted", *row] for row in rows)
    assert stats.sequences == 9, "private text is kept"


@given(cut=st.integers(2, 58), by=st.sampled_from(["tenant", "session"]), patience=st.sampled_from([0.0, 60.0]))
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_forgotten_during_a_request_does_not_come_back(
    runner: Runner, bench: Bench, monkeypatch: pytest.MonkeyPatch, cut: int, by: str, patience: float
) -> None:
    """Neither what was found to follow, also without time to search, nor the request's output, which ends later."""
    text = TEXT.tolist()
    monkeypatch.setattr(drafter, "PATIENCE", 60.0)
    for name in ("first", "second"):
        answer(runner, name, text, agentspec_session="s")
    runner.begin("a", TEXT[:0], agentspec_session="s")
    assert runner.step(2, a=text[:cut])["a"] or cut > 56
    bench.cache.forget(**{by: {"tenant": "default", "session": "s"}[by]})
    monkeypatch.setattr(drafter, "PATIENCE", patience)
    assert runner.step(2, a=text[cut : cut + 1])["a"] == []
    monkeypatch.setattr(drafter, "PATIENCE", 60.0)
    runner.step(a=text[cut + 1 :])
    runner.finish("a")
    assert outputs(bench) == [] and answer(runner, "b", text) == []
    bench.cache.forget(tenant="default")


def learned_ends(bench: Bench) -> list[int]:
    """The tokens after which outputs end, as the cache has learned it."""
    return bench.cache.request([1]).drafter.ends().tolist()


@pytest.mark.parametrize(
    ("output", "limits", "kept", "ends"),
    [
        ([1, 2, EOS], {}, [[1, 2, EOS]], [EOS]),
        ([1, 2, 3], {"most": 3}, [[1, 2, 3]], []),  # cut
        ([1] * (MAX_LENGTH - len(TEXT)), {"most": 500}, [[1] * (MAX_LENGTH - len(TEXT))], []),  # by the model's length
        ([1, 2], {"stop": ["!"]}, [[1, 2]], []),  # vLLM does not tell the drafter's process of stop strings
        ([1, 2], {}, [], []),  # aborted
        ([1], {"most": 1}, [], []),  # a probe, or what reads a prompt for another server
        ([EOS], {"most": 1}, [[EOS]], [EOS]),
    ],
)
def test_an_output_is_kept_as_it_ended(
    runner: Runner, bench: Bench, output: list[int], limits: dict[str, Any], kept: list[list[int]], ends: list[int]
) -> None:
    runner.begin("a", TEXT, **{"stop": (), **limits})
    runner.step(a=output)
    runner.finish("a")
    assert outputs(bench) == kept and learned_ends(bench) == ends


@pytest.mark.parametrize(
    ("first", "second", "together"),
    [
        ({"name": "0_r"}, {"name": "1_r"}, True),  # as vLLM names the samples of a request with `n`
        ({"name": "0_r"}, {"name": "1_s"}, False),
        ({"agentspec_group": ["g"]}, {"agentspec_group": ["g"]}, False),
        ({"prompt": SAME}, {"prompt": SAME}, True),  # as trainers ask for samples
        ({"prompt": SAME, "agentspec_group": "g"}, {"prompt": SAME}, False),
        ({"prompt": SAME, "agentspec_store": "off"}, {"prompt": SAME}, False),
        ({"prompt": SAME}, {"prompt": SAME, "agentspec_share": "off"}, False),
        ({"prompt": SAME, "salt": "x"}, {"prompt": SAME, "salt": "y"}, False),
        ({"prompt": SAME, "salt": "?"}, {"prompt": SAME, "salt": "?"}, False),
        ({"agentspec_group": "g", "agentspec_store": "off"}, {"agentspec_group": "g", "agentspec_share": "off"}, True),
        ({"agentspec_group": "g", "salt": "x"}, {"agentspec_group": "g", "salt": "x"}, True),
        ({"agentspec_group": "g", "salt": "x"}, {"agentspec_group": "g", "salt": "y"}, False),
        ({"agentspec_group": "g", "salt": "?"}, {"agentspec_group": "g", "salt": "?"}, False),  # salts that are lost
    ],
)
def test_the_open_outputs_of_a_group_are_drafted_from(
    runner: Runner, bench: Bench, first: dict[str, Any], second: dict[str, Any], together: bool
) -> None:
    one, two = {"name": "a", **first}, {"name": "b", **second}
    for number, request in enumerate((one, two)):
        runner.begin(**{"prompt": np.array([1, number], dtype=np.int32), **request})
    runner.step(**{one["name"]: TEXT[:40].tolist()})
    assert bool(runner.step(**{two["name"]: TEXT[5:9].tolist()})[two["name"]]) is together
    runner.finish(one["name"])
    runner.finish(two["name"])
    assert not bench.drafter._recorder._groups


@pytest.mark.parametrize("off", ["off", "OFF", "false", False, None, 0, ["on"], {}])
def test_what_is_switched_off_or_cannot_be_read_is_off(runner: Runner, bench: Bench, off: object) -> None:
    runner.begin("a", TEXT, agentspec_store=off)
    assert runner.step(a=TEXT[:4].tolist())["a"]
    runner.finish("a")
    assert outputs(bench) == []
    runner.begin("b", TEXT, agentspec_speculation=off, agentspec_store="on", agentspec_prediction=TEXT.tolist())
    assert [runner.step(b=TEXT[at : at + 4].tolist())["b"] for at in (0, 4)] == [[], []]
    runner.finish("b")
    assert outputs(bench) == [TEXT[:8].tolist()]
    runner.begin("c", TEXT[:1], agentspec_share=off, agentspec_session="s")
    runner.step(c=OTHER[:20].tolist())
    runner.finish("c")
    for session, known in (("t", False), ("s", True)):  # which alone keeps it
        runner.begin(session, np.concatenate((TEXT[:1], OTHER[:20])) if known else TEXT[:1], agentspec_session=session)
        assert bool(runner.step(**{session: OTHER[5:9].tolist()})[session]) is known
    assert outputs(bench) == [TEXT[:8].tolist()]


def test_no_drafts_for_sampling_with_a_seed_whose_text_they_would_change(runner: Runner, bench: Bench) -> None:
    for name, temperature in (("a", 0.0), ("b", 1.0)):
        bench.server.add(name, TEXT[:5])
        request = new(name, TEXT[:5])
        request.sampling_params.temperature = temperature
        request.sampling_params.extra_args = {"agentspec_prediction": TEXT[5:].tolist()}
        runner.proposer.scheduled(scheduled(request), bench.server)
    assert [bool(draft) for draft in runner.step(a=[int(TEXT[5])], b=[int(TEXT[5])]).values()] == [True, False]


def test_adapters_share_by_content_alone(runner: Runner, bench: Bench, tmp_path: Path) -> None:
    """Not by name or folder; those of which the files are elsewhere, by both."""

    def shares(adapter: str, folder: Path | str, weights: bytes | None = None) -> bool:
        if weights is not None:
            Path(folder).mkdir(exist_ok=True)
            (Path(folder) / "adapter_config.json").write_text("{}")
            (Path(folder) / "adapter_model.safetensors").write_bytes(weights)
        bench.server.add("r", TEXT[:5])
        request = new("r", TEXT[:5], stop=["!"])
        request.lora_request = SimpleNamespace(lora_name=adapter, lora_path=str(folder))
        runner.proposer.scheduled(scheduled(request), bench.server)
        bench.drafter.flush()
        found = bool(runner.step(r=TEXT[5:9].tolist())["r"])
        runner.step(r=TEXT[9:].tolist())
        runner.finish("r")
        return found

    assert not shares("a", tmp_path / "a", b"1")
    assert shares("a", tmp_path / "a") and shares("b", tmp_path / "b", b"1")
    assert not shares("c", tmp_path / "c", b"2") and not shares("a", tmp_path / "a", b"33")  # loaded again in place
    assert not shares("a", "org/one") and not shares("a", "org/two") and shares("a", "org/one")
    assert not shares("b", "org/one")


@pytest.mark.parametrize("given", ["embeddings", "no fields", "another rank"])
def test_a_request_without_what_is_needed_costs_its_own_drafts_only(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    if given == "another rank":
        monkeypatch.setattr(proposer, "drafts_here", lambda config: False)
    runner = Runner(bench)
    for name in ("a", "b"):
        bench.server.add(name, TEXT)
        request = new(name, TEXT)
        if given == "embeddings":
            request.prompt_embeds = object()
        elif given == "no fields":
            request.sampling_params.extra_args = "no fields"
        runner.proposer.scheduled(scheduled(request), bench.server)
    runner.begin("c", TEXT)
    drafts = runner.step(**dict.fromkeys("abc", TEXT[:4].tolist()))
    assert drafts["a"] == drafts["b"] == [] and bool(drafts["c"]) is (given != "another rank")
    runner.finish("a")
    assert caplog.text.count("goes without drafts") == (given == "no fields")
    assert bench.cache.stats().requests == (given != "another rank")


def test_requests_leave_nothing_behind_in_memory(runner: Runner, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of adapters, salted, in groups, with stop strings, cut, aborted, without token ids, or not recorded for want of
    room; searches end in their round or behind it.
    """
    rng, before = random.Random(1), followed_requests()
    for number in range(100):
        monkeypatch.setattr("agentspec.backends.engine_plugin.recorder.WAITING_TOKENS", rng.choice([0, 1 << 20]))
        monkeypatch.setattr(drafter, "PATIENCE", rng.choice([0.0, 60.0]))
        begun = []
        for sample in range(4):
            salt, stop, most = rng.choice([None, "pepper", "x"]), rng.choice([(), ("!",)]), rng.choice([1, 3, 100])
            begun.append(new(f"{sample}_{number}", TEXT[: rng.randrange(1, 9)], salt, stop, most))
            begun[-1].lora_request = rng.choice([None, SimpleNamespace(lora_name="a", lora_path="org/a")])
            begun[-1].prompt_embeds = rng.choice([None, None, object()])
        names = [request.req_id for request in begun]
        runner.vllm._update_states(scheduled(*begun))
        for _ in range(rng.randrange(3)):
            sampled = bench.server.sample({name: TEXT[: rng.randrange(4)].tolist() for name in names})
            runner.proposer.propose(MOST, bench.server, sampled)
        runner.vllm._update_states(scheduled(finished=(*names,)))
    del begun
    assert bench.drafter.flush() and not followed_requests() - before
    assert not runner.proposer._states and not bench.drafter._recorder._groups and bench.cache.stats().sequences

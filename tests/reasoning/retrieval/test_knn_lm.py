"""KNN-LM says the same with speculation and without, as a plain reading of the paper does; its search is exact."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentspec.backends.settings import TorchSettings
from agentspec.backends.torch import TorchBackend
from agentspec.errors import ConfigurationError, InvalidRequestError, NotReadyError
from agentspec.protocol.speculation import KnnSpeculation
from agentspec.reasoning.retrieval.datastore import Datastore, DatastoreManifest, build
from agentspec.reasoning.retrieval.knn_lm import DatastoreSearch, KnnBackend, KnnStride, Mixture, Neighbours
from agentspec.reasoning.settings import KnnLmSettings
from agentspec.reasoning.strategy import ModelRef
from agentspec.runtime import Runtime
from agentspec.settings.load import Settings
from agentspec.testing import FakeBackend
from agentspec.types import Delta, GenerateRequest, SamplingParams

pytestmark = pytest.mark.anyio

SOFT = {"neighbours": 8, "temperature": 20.0, "weight": 0.4}
WORDS = "red green blue fish bird tree house river stone light".split()
PROMPTS = 80
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
async def backend(tiny_model: Path) -> AsyncIterator[TorchBackend]:
    backend = TorchBackend.load(TorchSettings(model=str(tiny_model), max_draft_tokens=0))
    yield backend
    await backend.aclose()


@pytest.fixture(scope="module")
async def folder(backend: TorchBackend, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A datastore of sentences that repeat each other's words, some of them whole."""
    dice = random.Random(5)
    texts = [" ".join(dice.choices(WORDS, k=12)) for _ in range(12)]
    folder = tmp_path_factory.mktemp("knn") / "store"
    await build([*texts, *texts[:4]], folder, backend, lambda documents: None)
    return folder


async def opened(backend: TorchBackend, folder: Path, **knobs: Any) -> KnnBackend:
    settings = KnnLmSettings(base="tiny", datastore=folder, **(SOFT | knobs))
    model = KnnBackend("knn", settings, ModelRef(backend, "tiny"))
    await model.prepare()
    return model


def prompts() -> list[str]:
    dice = random.Random(9)
    return [" ".join(dice.choices(WORDS, k=dice.randint(1, 5))) for _ in range(PROMPTS)]


def asked(prompt: str, sampling: SamplingParams, *, speculation: bool = True) -> GenerateRequest:
    return GenerateRequest("tiny", text=prompt, sampling=sampling, speculation=speculation)


async def answer(model: KnnBackend | TorchBackend, request: GenerateRequest) -> tuple[list[int], str, Delta]:
    deltas = [delta async for delta in model.generate(request)]
    tokens = [token for delta in deltas for token in delta.token_ids]
    return tokens, "".join(delta.text for delta in deltas), deltas[-1]


def sampled(number: int) -> SamplingParams:
    return SamplingParams(temperature=(0.7, 1.0, 1.3)[number % 3], top_p=0.95, seed=number, max_tokens=12)


async def same(model: KnnBackend, prompt: str, sampling: SamplingParams) -> KnnSpeculation:
    """Require the answer of sequential KNN-LM, which searches for each token, and return the figures."""
    on, off = [await answer(model, asked(prompt, sampling, speculation=speculation)) for speculation in (True, False)]
    assert on[:2] == off[:2] and on[2].finish_reason == off[2].finish_reason and on[2].usage == off[2].usage
    assert isinstance(on[2].speculation, KnnSpeculation)
    return on[2].speculation


PROCESSORS = [
    SamplingParams(temperature=0, max_tokens=20, frequency_penalty=0.8, repetition_penalty=1.1),
    SamplingParams(temperature=0.9, seed=3, max_tokens=20, presence_penalty=0.5, min_tokens=5),
    SamplingParams(temperature=0, max_tokens=20, logit_bias={104: 3.0}, bad_words=("fi",)),
    SamplingParams(temperature=0, max_tokens=30, stop=("e",)),
]


@pytest.mark.parametrize("count", [2, pytest.param(PROMPTS, marks=pytest.mark.long)])
async def test_speculation_changes_no_byte(
    backend: TorchBackend, folder: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    dice = random.Random(2)
    monkeypatch.setattr(KnnStride, "choose", lambda self: dice.randint(1, 8))  # else the measured times choose
    model, figures = await opened(backend, folder), list[KnnSpeculation]()
    for number, prompt in enumerate(prompts()[:count]):
        for sampling in (GREEDY, sampled(number), *PROCESSORS[2 * (number % 2) :][:2]):
            figures.append(await same(model, prompt, sampling))
    drafted, accepted = sum(one.drafted for one in figures), sum(one.accepted for one in figures)
    assert 0 < accepted < drafted  # guesses were right and wrong
    assert all(one.strides[0] == 1 for one in figures if one.strides)  # nothing to guess from yet
    assert sum(one.searches for one in figures) < sum(one.queries for one in figures)
    assert max(max(one.strides, default=0) for one in figures) <= 8
    sure = await same(await opened(backend, folder, weight=0.01), "red green blue", GREEDY)
    assert sure.decided > 0 and sure.queries < 12  # what no neighbour can change asks for nothing


async def test_sequential_answers_are_those_of_the_paper(backend: TorchBackend, folder: Path, tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    module: Any = AutoModelForCausalLM.from_pretrained(tiny_model)
    keys = np.fromfile(folder / "keys.f16", np.float16).reshape(-1, 32).astype(np.float64)
    values = np.fromfile(folder / "values.i32", np.int32)
    model = await opened(backend, folder)
    for prompt in prompts()[:4]:
        tokens, _, _ = await answer(model, asked(prompt, GREEDY, speculation=False))
        text = backend.encode(prompt)
        for token in tokens:
            assert token == plain_knn_lm(module, text, keys, values)
            text.append(token)


def plain_knn_lm(module: Any, text: Sequence[int], keys: Any, values: Any) -> int:
    """The likeliest token behind `text`, written down from Khandelwal et al. 2020, equations 2 and 3."""
    with torch.no_grad():
        out = module(input_ids=torch.tensor([text]), output_hidden_states=True)
    query = out.hidden_states[-1][0, -1].double().numpy()
    distances = ((keys - query) ** 2).sum(1)
    best = np.argsort(distances, kind="stable")[: SOFT["neighbours"]]
    weights = np.exp(-(distances[best] - distances[best].min()) / SOFT["temperature"])
    p_knn = np.zeros(out.logits.shape[-1])
    for entry, weight in zip(best, weights / weights.sum(), strict=True):
        p_knn[values[entry]] += weight
    p_lm = out.logits[0, -1].double().softmax(0).numpy()
    return int((SOFT["weight"] * p_knn + (1 - SOFT["weight"]) * p_lm).argmax())


async def test_long_prompts_are_read_in_chunks_and_ordinary_requests_go_on(backend: TorchBackend, folder: Path) -> None:
    model, prompt = await opened(backend, folder), " ".join(WORDS * 15)
    ordinary = asked("a request of another kind", SamplingParams(temperature=0, max_tokens=20))
    expected = (await answer(backend, ordinary))[0]
    _, *others = await asyncio.gather(same(model, prompt, GREEDY), *(answer(backend, ordinary) for _ in range(2)))
    assert [other[0] for other in others] == [expected] * 2
    last = (await answer(model, asked(prompt, GREEDY)))[2]
    assert last.usage is not None and last.usage.prompt_tokens == len(backend.encode(prompt)) > 600


async def test_a_closed_iterator_ends_the_work(backend: TorchBackend, folder: Path) -> None:
    model = await opened(backend, folder)
    async with aclosing(model.generate(asked("red", SamplingParams(temperature=0, max_tokens=1000)))) as deltas:
        reading = asyncio.ensure_future(anext(deltas))
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait([reading])
    assert (await answer(model, asked("red", GREEDY)))[0]


@pytest.mark.parametrize(("name", "value"), [("n", 2), ("logprobs", True)])
async def test_unsupported_sampling_fields_are_refused(
    backend: TorchBackend, folder: Path, name: str, value: Any
) -> None:
    model = await opened(backend, folder)
    with pytest.raises(InvalidRequestError) as caught:
        await answer(model, asked("red", SamplingParams(**{name: value})))
    assert caught.value.param == name


def settings_of(model: Path, store: Path) -> Settings:
    models = {"facts": {"strategy": "knnlm", "base": "local", "datastore": str(store), "temperature": 20.0}}
    backends = {"local": {"kind": "torch", "model": str(model)}}
    return Settings(backends=backends, models=models)  # type: ignore[arg-type]


async def test_a_model_name_answers_with_a_datastore(tiny_model: Path, folder: Path, tmp_path: Path) -> None:
    async with Runtime(settings_of(tiny_model, folder)) as runtime:
        request = GenerateRequest("facts", messages=[{"role": "user", "content": "The river"}], sampling=GREEDY)
        opened: Any = runtime.route("facts").backend
        _, text, last = await answer(opened, request)
        took = last.speculation
        assert text and isinstance(took, KnnSpeculation) and took.strategy == "knnlm" and took.steps >= 12
        headers = opened.response_headers(request)
        assert headers == {"x-agentspec-lossless": "knnlm; neighbours=16; weight=0.25; temperature=20.0"}
    with pytest.raises(ConfigurationError, match=r"models\.facts: .* holds no datastore"):
        Runtime(settings_of(tiny_model, tmp_path)).start()


async def test_the_base_must_be_local() -> None:
    settings = KnnLmSettings(base="far", datastore=Path("~/store"))
    assert settings.datastore == Path.home() / "store"
    strategy = KnnBackend("facts", settings, ModelRef(FakeBackend(), "far"))
    with pytest.raises(ConfigurationError, match=r'models\.facts: .*"torch"'):
        await strategy.prepare()
    with pytest.raises(NotReadyError):
        await anext(strategy.generate(GenerateRequest("facts", text="x")))


# Search over datastores made to be hard: ties, copies, fewer entries than asked for, one query or many.


def store_of(keys: Any) -> Datastore:
    keys = np.asarray(keys, np.float16)
    manifest = DatastoreManifest("m", "f", keys.shape[1], 1, len(keys))
    return Datastore(manifest, keys, np.arange(len(keys), dtype=np.int32) % 7)


@pytest.fixture
def search_of(backend: TorchBackend) -> Callable[[Any], DatastoreSearch]:
    def search(keys: Any) -> DatastoreSearch:
        store = store_of(keys)
        return DatastoreSearch(store, asyncio.run(backend.open_scan(store.keys)))

    return search


def oracle(keys: Any, query: Any, count: int) -> list[int]:
    """By distance in exact arithmetic of Python's, then entry."""

    def distance(key: Any) -> Fraction:
        pairs = zip(key, query, strict=True)
        return sum(((Fraction(float(a)) - Fraction(float(b))) ** 2 for a, b in pairs), Fraction())

    return sorted(range(len(keys)), key=lambda entry: (distance(keys[entry]), entry))[:count]


@st.composite
def hard_keys(draw: st.DrawFn) -> Any:
    """A few different vectors, many copies, on a coarse grid so that different ones are equally far too."""
    width = draw(st.integers(1, 9))
    grid = st.lists(st.integers(-3, 3), min_size=width, max_size=width)
    kinds = draw(st.lists(grid, min_size=1, max_size=6))
    picks = draw(st.lists(st.integers(0, len(kinds) - 1), min_size=1, max_size=40))
    return np.array([kinds[pick] for pick in picks], np.float16) * np.float16(draw(st.sampled_from([0.25, 1.0, 60.0])))


@given(keys=hard_keys(), data=st.data())
def test_ties_go_to_the_smaller_entry(search_of: Any, keys: Any, data: st.DataObject) -> None:
    wide = st.lists(st.integers(-3, 3), min_size=keys.shape[1], max_size=keys.shape[1])
    queries = np.array(data.draw(st.lists(wide, min_size=3, max_size=3)), np.float32)
    count = data.draw(st.integers(1, 60))
    for query, found in zip(queries, search_of(keys).search(queries, count), strict=True):
        assert found.entries.tolist() == oracle(keys, query, count)
        assert found.tokens.tolist() == [entry % 7 for entry in found.entries]


@pytest.mark.parametrize("offset", [0.0, 30.0])
def test_a_batch_finds_what_single_queries_find(search_of: Any, offset: float) -> None:
    dice = np.random.default_rng(1)
    keys = (dice.standard_normal((20_000, 48)) + offset).astype(np.float16)
    keys[5_000:6_000] = keys[:1_000]
    datastore, near = search_of(keys), keys[dice.integers(len(keys), size=16)].astype(np.float32)
    queries = (near + dice.standard_normal(near.shape) * 0.01).astype(np.float32)
    for query, found in zip(queries, datastore.search(queries, 12), strict=True):
        (single,) = datastore.search(query[None], 12)
        assert single.entries.tolist() == found.entries.tolist()
        assert single.distances.tobytes() == found.distances.tobytes()
        distances = np.square(keys.astype(np.float64) - query).sum(1)
        assert found.entries.tolist() == np.argsort(distances, kind="stable")[:12].tolist()


@given(data=st.data())
def test_no_neighbours_change_a_decided_token(data: st.DataObject) -> None:
    logits = np.array(data.draw(st.lists(st.floats(-20, 20, width=32), min_size=7, max_size=7)), np.float32)
    mixture = Mixture(data.draw(st.floats(0.01, 0.99)), data.draw(st.floats(0.1, 50)))
    tokens = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=9))
    distances = np.sort(np.array([data.draw(st.floats(0, 1e4)) for _ in tokens]))
    prior = mixture.prior(logits)
    scores = mixture.scores(prior, Neighbours(np.arange(len(tokens)), distances, np.array(tokens, np.int32)))
    assert np.exp(scores.astype(np.float64)).sum() == pytest.approx(1, abs=1e-5)
    assert mixture.decided(prior) in (None, int(scores.argmax()))

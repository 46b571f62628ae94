"""KNN-LM says the same with speculation and without, and what a plain reading of the paper says."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentspec.backends.base import AddsHeaders
from agentspec.backends.settings import TorchSettings
from agentspec.backends.torch import TorchBackend
from agentspec.errors import ConfigurationError, InvalidRequestError, NotReadyError
from agentspec.protocol.speculation import KnnSpeculation
from agentspec.reasoning.retrieval.datastore import build
from agentspec.reasoning.retrieval.knn_lm import KnnBackend, KnnStride, Mixture
from agentspec.reasoning.settings import KnnLmSettings
from agentspec.reasoning.strategy import ModelRef
from agentspec.runtime import Runtime
from agentspec.settings.load import Settings
from agentspec.testing import FakeBackend
from agentspec.types import Delta, GenerateRequest, SamplingParams

pytestmark = pytest.mark.anyio

SOFT = {"neighbours": 8, "temperature": 20.0, "weight": 0.4}
WORDS = "red green blue fish bird tree house river stone light".split()
PROMPTS = 200
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
    folder = tmp_path_factory.mktemp("store")
    await build([*texts, *texts[:4]], folder, backend, lambda documents: None)
    return folder


@pytest.fixture
def fixed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Takes a stride that does not adapt, and asks for every token unless told otherwise."""

    def fix(stride: int | None = None, *, bound: bool = True) -> None:
        if stride is not None:
            monkeypatch.setattr(KnnStride, "choose", lambda self: stride)
        if not bound:
            monkeypatch.setattr(Mixture, "decided", lambda self, prior: None)

    return fix


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


Alone = Callable[[str, int], Awaitable[tuple[list[int], str]]]


@pytest.fixture(scope="module")
async def alone(backend: TorchBackend, folder: Path) -> Alone:
    """What sequential KNN-LM answers, greedily (-1) or by seed."""
    model = await opened(backend, folder)
    found: dict[tuple[str, int], tuple[list[int], str]] = {}

    async def answered(prompt: str, seed: int) -> tuple[list[int], str]:
        if (prompt, seed) not in found:
            sampling = GREEDY if seed < 0 else sampled(seed)
            found[prompt, seed] = (await answer(model, asked(prompt, sampling, speculation=False)))[:2]
        return found[prompt, seed]

    return answered


@pytest.mark.parametrize("count", [4, pytest.param(PROMPTS, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("stride", "bound"),
    [
        (None, True),
        (4, False),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in [(1, True), (2, True), (3, True), (5, True), (8, True), (None, False)]
        ),
    ],
)
async def test_speculation_changes_no_byte(
    backend: TorchBackend,
    folder: Path,
    alone: Alone,
    fixed: Callable[..., None],
    stride: int | None,
    bound: bool,
    count: int,
) -> None:
    fixed(stride, bound=bound)
    model = await opened(backend, folder)
    drafted = accepted = 0
    for number, prompt in enumerate(prompts()[:count]):
        for seed, sampling in ((-1, GREEDY), (number, sampled(number))):
            tokens, text, last = await answer(model, asked(prompt, sampling))
            assert (tokens, text) == await alone(prompt, seed)
            assert isinstance(last.speculation, KnnSpeculation)
            drafted += last.speculation.drafted
            accepted += last.speculation.accepted
    assert 0 < accepted < drafted  # guesses were right and wrong


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


async def test_batches_save_searches(backend: TorchBackend, folder: Path, fixed: Callable[..., None]) -> None:
    fixed(4, bound=False)
    model = await opened(backend, folder)
    _, _, last = await answer(model, asked("red green blue", SamplingParams(temperature=0, max_tokens=60)))
    done = last.speculation
    assert isinstance(done, KnnSpeculation)
    assert done.strides[0] == 1  # nothing to guess from yet
    assert max(done.strides) <= 4 and done.searches < done.queries
    assert done.steps < 60 * 2


async def test_decided_tokens_ask_for_nothing(backend: TorchBackend, folder: Path, fixed: Callable[..., None]) -> None:
    request = asked("red green blue", SamplingParams(temperature=0, max_tokens=24))
    with_bound, _, done = await answer(await opened(backend, folder, weight=0.01), request)
    fixed(bound=False)
    without, _, all_asked = await answer(await opened(backend, folder, weight=0.01), request)
    assert with_bound == without
    assert isinstance(done.speculation, KnnSpeculation) and isinstance(all_asked.speculation, KnnSpeculation)
    assert done.speculation.decided > 0 and all_asked.speculation.decided == 0
    assert done.speculation.queries < all_asked.speculation.queries


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0, max_tokens=20, frequency_penalty=0.8, repetition_penalty=1.1),
        SamplingParams(temperature=0.9, seed=3, max_tokens=20, presence_penalty=0.5, min_tokens=5),
        SamplingParams(temperature=0, max_tokens=20, logit_bias={104: 3.0}, bad_words=("fi",)),
        SamplingParams(temperature=0, max_tokens=30, stop=("e",)),
    ],
)
async def test_processors_see_the_drafted_history(
    backend: TorchBackend, folder: Path, sampling: SamplingParams, fixed: Callable[..., None]
) -> None:
    fixed(4)
    model = await opened(backend, folder)
    for prompt in prompts()[:2]:
        off = await answer(model, asked(prompt, sampling, speculation=False))
        on = await answer(model, asked(prompt, sampling))
        assert on[:2] == off[:2] and on[2].finish_reason == off[2].finish_reason and on[2].usage == off[2].usage


async def test_answers_beside_ordinary_requests(backend: TorchBackend, folder: Path, alone: Alone) -> None:
    model = await opened(backend, folder)
    ordinary = asked("a request of another kind", SamplingParams(temperature=0, max_tokens=20))
    expected = (await answer(backend, ordinary))[0]
    some = prompts()[:3]
    results = await asyncio.gather(
        answer(backend, ordinary), *(answer(model, asked(prompt, GREEDY)) for prompt in some), answer(backend, ordinary)
    )
    assert results[0][0] == results[-1][0] == expected
    assert [result[:2] for result in results[1:-1]] == [await alone(prompt, -1) for prompt in some]


async def test_a_closed_iterator_ends_the_work(backend: TorchBackend, folder: Path) -> None:
    model = await opened(backend, folder)
    async with aclosing(model.generate(asked("red", SamplingParams(temperature=0, max_tokens=1000)))) as deltas:
        await anext(deltas)
    steps: list[int] = []
    session = await backend.open_steps(asked("red", GREEDY))
    task = asyncio.create_task(session.run(lambda each: steps.append(len(each.tokens))))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await answer(model, asked("red", GREEDY)))[0]


async def test_long_prompts_are_read_in_chunks(backend: TorchBackend, folder: Path) -> None:
    model = await opened(backend, folder)
    prompt = " ".join(WORDS * 15)
    off, _, last = await answer(model, asked(prompt, GREEDY, speculation=False))
    assert (await answer(model, asked(prompt, GREEDY)))[0] == off
    assert last.usage is not None and last.usage.prompt_tokens == len(backend.encode(prompt)) > 600


@pytest.mark.parametrize(("name", "value"), [("n", 2), ("logprobs", True)])
async def test_what_it_does_not_carry_is_refused(backend: TorchBackend, folder: Path, name: str, value: Any) -> None:
    model = await opened(backend, folder)
    with pytest.raises(InvalidRequestError) as caught:
        await answer(model, asked("red", SamplingParams(**{name: value})))
    assert caught.value.param == name


def settings_of(model: Path, store: Path) -> Settings:
    models = {"facts": {"strategy": "knnlm", "base": "local", "datastore": str(store), "temperature": 20.0}}
    backends = {"local": {"kind": "torch", "model": str(model)}}
    return Settings(backends=backends, models=models)  # type: ignore[arg-type]


async def test_a_model_name_answers_with_a_datastore(tiny_model: Path, folder: Path) -> None:
    async with Runtime(settings_of(tiny_model, folder)) as runtime:
        messages = [{"role": "user", "content": "The river"}]
        request = GenerateRequest("facts", messages=messages, sampling=SamplingParams(temperature=0, max_tokens=20))
        opened = runtime.route("facts").backend
        _, text, last = await answer(opened, request)  # type: ignore[arg-type]
        took = last.speculation
        assert text and isinstance(took, KnnSpeculation) and took.strategy == "knnlm" and took.steps >= 20
        assert opened.capabilities.token_ids and not opened.capabilities.logprobs
        assert isinstance(opened, AddsHeaders)
        headers = opened.response_headers(request)
        assert headers == {"x-agentspec-lossless": "knnlm; neighbours=16; weight=0.25; temperature=20.0"}


async def test_a_datastore_that_is_not_there_is_a_configuration_error(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"models\.facts: .* holds no datastore"):
        Runtime(settings_of(tiny_model, tmp_path)).start()


async def test_the_base_must_be_local(tmp_path: Path) -> None:
    strategy = KnnBackend("facts", KnnLmSettings(base="far", datastore=tmp_path), ModelRef(FakeBackend(), "far"))
    with pytest.raises(ConfigurationError, match=r'models\.facts: .*"torch"'):
        await strategy.prepare()
    with pytest.raises(NotReadyError):
        await anext(strategy.generate(GenerateRequest("facts", text="x")))

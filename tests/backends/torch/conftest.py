"""Tiny random models of every family, a byte tokenizer, and a laboratory that compares the engine with an oracle.

The oracle is the untouched model, run without a cache on the whole text for every single token, and the sampling rule
written out once more in plain numpy and integers. It shares no code with the engine.
"""

from __future__ import annotations

import copy
import functools
import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OlmoConfig,
    Phi3Config,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
)

import agentspec.backends.torch
from agentspec.backends.torch.drafters.base import make_draft
from agentspec.backends.torch.drafters.draft_model import DraftModel
from agentspec.backends.torch.engine.engine import run_step
from agentspec.backends.torch.engine.scheduler import plan_step
from agentspec.backends.torch.engine.sequence import EngineContext, EngineRequest
from agentspec.backends.torch.engine.sequence import Sequence as EngineSequence
from agentspec.backends.torch.loader import LoadedModel, prepare
from agentspec.backends.torch.model.graphs.recording import record_graphs
from agentspec.backends.torch.model.kv_cache import SequenceCache
from agentspec.backends.torch.sampling.constraints import ConstraintSpec
from agentspec.backends.torch.text.tokenizer import TokenizerAdapter
from agentspec.speculation.governor import Governor, RequestStats
from agentspec.types import Delta, Draft, GenerateRequest, SamplingParams, Speculation, TokenLogprob, Usage
from tests.mutation import Mutate, apply_mutation

Allowed = Callable[[Sequence[int]], Collection[int]]  # from an answer to the tokens that may follow it

DEVICE = os.environ.get("AGENTSPEC_TEST_DEVICE", "cpu")  # of the engine in laboratories; their oracle is on the CPU
EOS, USER, ASSISTANT = 256, 257, 258
VOCAB = 259
WINDOW = 6
NEAR_TIE = 1e-3

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
}

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**SHAPE),
    "qwen2": lambda: Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32
    ),
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=8),
    "mistral": lambda: MistralConfig(**SHAPE, sliding_window=WINDOW),
    "mixtral": lambda: MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
    "olmo": lambda: OlmoConfig(**SHAPE),
    "olmo2": lambda: Olmo2Config(**SHAPE),
    "gemma2": lambda: Gemma2Config(**SHAPE, head_dim=8, sliding_window=WINDOW),
    "gemma3": lambda: Gemma3TextConfig(
        **SHAPE, head_dim=8, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]
    ),
    "phi3": lambda: Phi3Config(**SHAPE),
    "gpt_oss": lambda: GptOssConfig(
        **SHAPE, num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=512, initializer_range=0.3,
        bos_token_id=None, eos_token_id=EOS,
    ),
}  # fmt: skip

# These meet every test of families; of the others, which are slow together, `make check` tries three.
MAIN_FAMILIES = ("gemma3", "gpt2", "llama")
CHECKED_FAMILIES = ("gpt_oss", "mixtral", "qwen3")  # sinks and windows, experts, norms of queries and keys
OTHER_FAMILIES = [
    pytest.param(name, marks=pytest.mark.slow if name in CHECKED_FAMILIES else pytest.mark.long)
    for name in sorted(CONFIGS)
    if name not in MAIN_FAMILIES
]

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + m['role']) }}{% endif %}"
    "<|{{ 'assistant' if m['role'] == 'assistant' else 'user' }}|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny models gain nothing from threads, and lose much on a busy machine."""
    torch.set_num_threads(1)


def byte_tokenizer(template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """One token per byte, plus an end of text and two chat markers."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|user|>", "<|assistant|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=template)


def tiny(name: str) -> Any:
    torch.manual_seed(7)
    return AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32).eval()


class EagerGovernor(Governor):
    """Verifies whatever is drafted, so that every draft meets the verifier."""

    def choose(self, worths: Sequence[Sequence[float]], **step: Any) -> list[list[int]]:
        return [list(range(len(worth))) for worth in worths]

    def request_stats(self, step: str | None = None, tenant: str = "") -> RequestStats:
        return AlwaysAsk()


class AlwaysAsk(RequestStats):
    def ask(self) -> bool:
        return True


class ScriptedSession:
    """A session with a cache whose drafts come from a function of the text so far and the budget."""

    def __init__(self, script: Callable[[list[int], int], Draft | None], prompt: Sequence[int]) -> None:
        self.script, self.text = script, list(prompt)

    def draft(self, max_tokens: int = 32, min_probability: float = 0.0) -> Draft | None:
        return self.script(self.text, max_tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        self.text += tokens

    def flush_to_cache(self) -> None:
        pass

    def close(self, *, clean: bool, ended: bool = True) -> None:
        pass


@dataclass
class Outcome:
    """What one sequence produced."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: str | None = None
    usage: Usage = field(default_factory=Usage)
    speculation: Speculation | None = None
    deltas: list[Delta] = field(default_factory=list)
    sequence: EngineSequence | None = None

    @property
    def rounds(self) -> int:
        return len(self.deltas)

    def add(self, delta: Delta) -> None:
        self.tokens += delta.token_ids
        self.text += delta.text
        self.logprobs += delta.logprobs
        self.deltas.append(delta)
        if delta.finish_reason:
            self.finish, self.usage, self.speculation = delta.finish_reason, delta.usage or Usage(), delta.speculation


Script = Callable[[list[int], int], Draft | None]


@dataclass(frozen=True)
class Ask:
    """One request of a laboratory; without a script there is no speculation."""

    prompt: Sequence[int]
    sampling: SamplingParams
    script: Script | None = None
    max_tokens: int = 24
    stop_ids: Sequence[int] = (EOS,)
    prediction: Sequence[int] | None = None
    speculates: bool = False  # without a script too
    constraints: ConstraintSpec = field(default_factory=ConstraintSpec)
    request: dict[str, Any] = field(default_factory=dict)

    def begin(self, context: EngineContext, kv_cache: SequenceCache | None) -> EngineSequence:
        prompt = list(self.prompt)
        speculation = self.speculates or self.script is not None or self.prediction is not None
        request = GenerateRequest(
            "tiny", token_ids=prompt, sampling=self.sampling, speculation=speculation, **self.request
        )
        predicted = None if self.prediction is None else list(self.prediction)
        engine_request = EngineRequest(
            request,
            prompt,
            self.max_tokens,
            frozenset(self.stop_ids),
            predicted,
            lambda item: None,
            constraints=self.constraints,
        )
        session: Any = ScriptedSession(self.script or (lambda text, budget: None), prompt)
        return EngineSequence(engine_request, context, kv_cache or context.target.new_cache(1), session)


def no_forward_fails() -> None:
    """Trying each sequence alone would hide what is wrong with packing them."""
    raise AssertionError("a forward failed")


def check_invariants(sequence: EngineSequence, outcome: Outcome) -> None:
    """I1 and I2 of batched speculation: the tokens are those told, and rows cover all of them but the last."""
    session: Any = sequence._session
    assert sequence.tokens == [*sequence.request.prompt, *outcome.tokens] == session.text
    assert sequence.kv_cache.length == len(sequence.tokens) - 1


class Lab:
    """One model twice: as the engine runs it, and untouched for the oracle."""

    def __init__(self, module: Any, tokenizer: Any = None) -> None:
        self.reference = copy.deepcopy(module)
        tokens = tokenizer or byte_tokenizer()
        self.loaded: LoadedModel = prepare(module.to(DEVICE), tokens, name="tiny", fingerprint="f")
        self.target = self.loaded.target
        record_graphs(self.target)  # on a CUDA device
        self.tokenizer = TokenizerAdapter(self.loaded.tokenizer)
        self.divergences: list[str] = []
        self.draws_ahead: bool | None = None
        self._answers: dict[Any, list[int]] = defaultdict(list)  # as long as any test asked for, whatever ends them

    def run(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        script: Script | None = None,
        *,
        kv_cache: SequenceCache | None = None,
        governor: Governor | None = None,
        max_draft: int = 48,
        draft_model: DraftModel | None = None,
        **options: Any,
    ) -> Outcome:
        """Generate one answer; `options` as `Ask` has them."""
        ask = Ask(prompt, sampling, script, speculates=draft_model is not None, **options)
        knobs: dict[str, Any] = {"governor": governor, "max_draft": max_draft, "kv_cache": kv_cache}
        return self.run_batch([ask], **knobs, draft_model=draft_model)[0]

    def run_each(
        self, prompt: Sequence[int], sampling: SamplingParams, scripts: Iterable[Script | None], **options: Any
    ) -> list[Outcome]:
        """One answer for each script, all in one batch: as many forwards as the slowest of them needs."""
        return self.run_batch([Ask(prompt, sampling, script, **options) for script in scripts])

    def run_batch(
        self,
        asks: Sequence[Ask],
        *,
        governor: Governor | None = None,
        max_draft: int = 48,
        kv_cache: SequenceCache | None = None,
        draft_model: DraftModel | None = None,
        between: Callable[[list[EngineSequence]], None] = lambda sequences: None,
    ) -> list[Outcome]:
        """Generate all answers through the engine's own steps, verifying every draft of their scripts.

        `between` is called before each step with the sequences that take part in it, and may take some out or
        change their caches.
        """
        context = EngineContext(
            self.target,
            self.tokenizer,
            governor=governor or EagerGovernor(),
            max_draft_tokens=max_draft,
            free_memory=no_forward_fails,
            draft_model=draft_model,
            draws_ahead=self.draws_ahead,
        )
        sequences = [ask.begin(context, kv_cache if len(asks) == 1 else None) for ask in asks]
        outcomes = {sequence: Outcome(sequence=sequence) for sequence in sequences}
        active = list(sequences)
        with torch.inference_mode():
            while active:
                between(active)
                for sequence, outcome in run_step(plan_step(active, context), context):
                    if isinstance(outcome, Exception):
                        raise outcome
                    if outcome is not None:
                        outcomes[sequence].add(outcome)
                        check_invariants(sequence, outcomes[sequence])
                active = [sequence for sequence in active if sequence.finish is None]
        return [outcomes[sequence] for sequence in sequences]

    def oracle(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        max_tokens: int = 24,
        stop_ids: Sequence[int] = (EOS,),
        allowed: Allowed | None = None,
        choice: int = 0,
    ) -> list[int]:
        """What the untouched model alone answers. It reads the whole text for each token, so answers are kept."""
        key = (tuple(prompt), repr(sampling), choice)
        answer = self._answers[key] if allowed is None else []
        for place in range(max_tokens):
            if place == len(answer):
                answer.append(int(np.argmax(self.scores(prompt, answer, sampling, allowed, choice))))
            if answer[place] in stop_ids:
                return answer[: place + 1]
        return answer[:max_tokens]

    def scores(
        self,
        prompt: Sequence[int],
        answer: Sequence[int],
        sampling: SamplingParams,
        allowed: Allowed | None = None,
        choice: int = 0,
    ) -> np.ndarray:
        """The perturbed scores [vocab] whose argmax is the next token; -inf where the rule excludes one."""
        logits = self.logits([*prompt, *answer])
        if allowed is not None:
            logits = np.where(np.isin(np.arange(len(logits)), list(allowed(answer))), logits, -np.inf)
        return plain_rule(logits, prompt, answer, sampling, choice)

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """The reference model's float32 logits [vocab] after `ids`."""
        out = self.reference(input_ids=torch.tensor([list(ids)]), use_cache=False)
        return out.logits[0, -1].float().numpy()

    def require_same(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        got: Sequence[int],
        want: Sequence[int],
        allowed: Allowed | None = None,
    ) -> None:
        """Equal up to the first divergence, which must be a near-tie; each one is counted and printed."""
        for i, (left, right) in enumerate(zip(got, want, strict=False)):
            if left != right:
                scores = self.scores(prompt, list(want[:i]), sampling, allowed)
                gap = abs(float(scores[left] - scores[right]))
                self.divergences.append(f"token {i}: {left} for {right}, gap {gap:.2e}")
                print("near-tie divergence:", self.divergences[-1])
                assert gap < NEAR_TIE, self.divergences[-1]
                return
        assert len(got) == len(want)


def plain_rule(
    logits: np.ndarray, prompt: Sequence[int], answer: Sequence[int], sampling: SamplingParams, choice: int = 0
) -> np.ndarray:
    """The sampling rule, written out plainly."""
    scores = logits.astype(np.float64)
    for token, bias in sampling.logit_bias.items():
        scores[token] += bias
    for token in {*prompt, *answer}:
        scale = sampling.repetition_penalty
        scores[token] = scores[token] / scale if scores[token] > 0 else scores[token] * scale
    for token in set(answer):
        scores[token] -= sampling.frequency_penalty * list(answer).count(token) + sampling.presence_penalty
    if sampling.temperature == 0:
        return scores
    scores /= sampling.temperature
    if sampling.min_p > 0:
        scores[scores < scores.max() + math.log(sampling.min_p)] = -np.inf
    if 0 < sampling.top_k < len(scores):
        scores[scores < np.sort(scores)[-sampling.top_k]] = -np.inf
    if sampling.top_p < 1:
        order = np.argsort(-scores, kind="stable")
        weights = np.exp(scores[order] - scores.max())
        before = np.cumsum(weights / weights.sum()) - weights / weights.sum()
        scores[order[before >= sampling.top_p]] = -np.inf
    position = len(prompt) + len(answer)
    seed = sampling.seed or 0
    return scores + plain_gumbel(seed, position, np.arange(len(scores), dtype=np.uint64), choice)


WORD = 2**64 - 1


def _splitmix(word: Any) -> Any:
    """Of an integer below 2^64, or of an array of them."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & WORD
    return word ^ (word >> 31)


def plain_gumbel(seed: int, position: int, tokens: np.ndarray, choice: int = 0) -> np.ndarray:
    golden = 0x9E3779B97F4A7C15
    key = _splitmix(_splitmix(seed + golden & WORD) ^ choice)
    key = _splitmix(key + golden * (position + 1) & WORD)
    bits = _splitmix(tokens * golden + key) >> 32
    return -np.log(-np.log1p(-np.minimum((bits + 0.5) / 2**32, 1 - 2**-25)))


@functools.cache
def laboratory(name: str) -> Lab:
    return Lab(tiny(name))


@pytest.fixture(scope="session", params=[*MAIN_FAMILIES, *OTHER_FAMILIES])
def family(request: pytest.FixtureRequest) -> Lab:
    """Each model family in turn."""
    return laboratory(request.param)


@pytest.fixture(scope="session", params=OTHER_FAMILIES)
def other_family(request: pytest.FixtureRequest) -> Lab:
    return laboratory(request.param)


@pytest.fixture(scope="session")
def lab() -> Lab:
    return laboratory("llama")


class Trees:
    """Makes drafts from tokens and parents, every node equally probable."""

    def __call__(self, tokens: Sequence[int], parents: Sequence[int]) -> Draft:
        return make_draft(tokens, parents, [0.5] * len(tokens), [1] * len(tokens), [0] * len(tokens))

    def chain(self, tokens: Sequence[int]) -> Draft:
        return self(tokens, range(-1, len(tokens) - 1))

    def winding(self, rest: Sequence[int], rng: np.random.Generator, size: int) -> Draft:
        """A random tree of `size` nodes through which the path `rest` winds, now and then."""
        tokens: list[int] = []
        parents: list[int] = []
        depth: list[int] = []
        for node in range(size):
            parent = int(rng.integers(-1, node)) if node else -1
            at = depth[parent] + 1 if parent >= 0 else 0
            known = at < len(rest) and rng.random() < 0.7
            tokens.append(int(rest[at]) if known else int(rng.integers(0, VOCAB)))
            parents.append(parent)
            depth.append(at)
        return self(tokens, parents)


tree_of = Trees()


@pytest.fixture(scope="session")
def byte_tokens() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `from_pretrained` wants it."""
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    tiny("llama").save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def mutate(monkeypatch: pytest.MonkeyPatch) -> Mutate:
    """Changes a function or method of the engine, found by its qualified name, for the duration of a test."""
    return lambda *change: apply_mutation(monkeypatch, agentspec.backends.torch, *change)


plain_linear = functional.linear


def split_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    if x.dtype != torch.bfloat16:
        return plain_linear(x, weight, bias)
    rows = x.numel() // x.shape[-1]
    step = -(-x.shape[-1] // (8 if rows <= 5 else 1 if rows <= 6 else 3))
    parts = [plain_linear(x[..., at : at + step], weight[:, at : at + step]) for at in range(0, x.shape[-1], step)]
    total = torch.stack(parts).sum(0)
    return total if bias is None else total + bias


@pytest.fixture
def split_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, linear layers sum in parts, as a GPU's kernels do: their number depends on the rows, and each is
    rounded.
    """
    monkeypatch.setattr(functional, "linear", split_linear)


class Waits(TorchDispatchMode):
    """Counts what would make the host wait for a device: values that it reads, and shapes that depend on values."""

    def __init__(self, seen: Counter[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        masked = func is aten.index.Tensor and any(index is not None and index.dtype == torch.bool for index in args[1])
        if masked or func in (aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default):
            self.seen[str(func)] += 1
        return func(*args, **kwargs or {})

    def counting(self, name: str) -> Any:
        method = getattr(torch.Tensor, name)

        def counted(tensor: torch.Tensor, *args: Any) -> Any:
            self.seen[name] += 1
            return method(tensor, *args)

        return counted


@pytest.fixture(scope="session")
def waits() -> Any:
    """A context that counts how often the host would wait for a device inside, by what it did."""

    @contextmanager
    def counted(seen: Counter[str]) -> Iterator[None]:
        mode = Waits(seen)
        with pytest.MonkeyPatch.context() as patch, mode:
            for name in ("tolist", "cpu"):
                patch.setattr(torch.Tensor, name, mode.counting(name))
            yield

    return counted

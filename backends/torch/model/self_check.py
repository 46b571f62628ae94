"""Checks at load whether the engine's forwards compute what the model computes by itself.

Structure (masks, positions, slots) is checked on a small random copy of the model in float32, where a mistake is
thousands of times larger than rounding. The real weights are then compared with the rounding that was measured on them:
a bound in logits would depend on the model, so differences are relative to the logits' own spread.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agentspec.backends.torch.model.device import is_device_error, is_out_of_memory
from agentspec.backends.torch.model.target import TargetModel

logger = logging.getLogger(__name__)

SAFETY = 6.0  # times the measured noise that two forwards may differ: it is a small sample (4.8 were seen with AVX2)
MOST = 6.0  # roots of the type's resolution: half a spread in bfloat16, where a mistake moves logits by a whole one


def relative_difference(computed: Tensor, expected: Tensor) -> float:
    """The root mean square of `computed - expected` [rows, vocab] over the spread of the expected logits in a row."""
    spread = (expected - expected.mean(-1, keepdim=True)).square().mean().sqrt()
    return float((computed - expected).square().mean().sqrt() / spread)


def allowed_difference(noise: float, dtype: torch.dtype) -> float:
    """The largest relative difference that rounding explains, given the `noise` that was measured. It leaves at least
    half of the type's digits to rounding, since few measurements may find less noise than there is.
    """
    return float(min(max(SAFETY * noise, torch.finfo(dtype).eps ** 0.5), largest_noise(dtype)))


def largest_noise(dtype: torch.dtype) -> float:
    """The largest relative difference that rounding can make in a sound model; 2e-3 in float32."""
    return float(MOST * torch.finfo(dtype).eps ** 0.5)


CHECK_TOKENS, CHECK_TREE, CHECK_PARENTS = 5, 4, (-1, -1, 0, 1)
EXACT = 2e-3  # relative difference of a copy's logits in float32; TF32 rounds by less
LEAST_SIGNAL = 0.05  # relative difference that another first token must make, or a copy shows no mistakes
LARGEST_COPY = 300_000_000  # parameters
VOCAB, WIDTH, WINDOW, LAYERS = 512, 128, 4, 2  # sizes of a copy
INNER = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "n_inner", "ffn_dim")
EXPERTS, CHOSEN = ("num_experts", "num_local_experts", "n_routed_experts"), 2
FAILURES = (TypeError, ValueError, AttributeError, NotImplementedError, LookupError, RuntimeError, AssertionError)


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """A few tokens, a draft tree after them, and the model's own logits [1 + tree, vocab], each path run by itself.

    `noise` is the relative difference between logits of the model's own forwards that must be equal but for rounding.
    """

    tokens: list[int]
    nodes: list[int]
    logits: Tensor
    noise: float

    @classmethod
    @torch.inference_mode()
    def of(cls, module: Any, seed: int = 0) -> SelfCheck:
        vocab = module.config.get_text_config().vocab_size
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(vocab, (CHECK_TOKENS + CHECK_TREE,), generator=generator).tolist()
        tokens, nodes = ids[:CHECK_TOKENS], ids[CHECK_TOKENS:]
        texts = [tokens + _path(nodes, node) for node in range(-1, len(nodes))]
        logits = torch.stack([_own_logits(module, [text])[0, -1] for text in texts])
        return cls(tokens, nodes, logits, measured_noise(module, ids))

    def passes(self, target: TargetModel) -> bool:
        """Whether `target` computes the same but for rounding. An exception counts as a difference, unless it says that
        there is no memory or that the device failed: then it is raised.

        A model whose own forwards contradict each other, since its tokens see later ones, never passes.
        """
        if not self.noise <= largest_noise(target.dtype):
            return False
        try:
            difference = relative_difference(self.logits_of(target), self.logits)
        except FAILURES as error:
            raise_fault(error)
            logger.debug("%s fails with %s attention: %s", type(target.module).__name__, target.attention, error)
            return False
        return difference <= allowed_difference(self.noise, target.dtype)

    def logits_of(self, target: TargetModel) -> Tensor:
        """The logits of one forward over cached slots, tokens and tree."""
        cache = target.new_cache(1)
        target.prefill(cache, self.tokens[:2])
        return target.forward(cache, self.tokens[2:], self.nodes, CHECK_PARENTS)


@torch.inference_mode()
def measured_noise(module: Any, ids: Sequence[int]) -> float:
    """The relative difference between the logits after each prefix of `ids`, computed in forwards of different
    shape: over the prefix, over the whole text, and over two copies of it.

    All are forwards of the model's own code without a cache, so that nothing under test takes part.
    """
    (whole,), pair = _own_logits(module, [ids]), _own_logits(module, [ids, ids])
    prefixes = torch.stack([_own_logits(module, [ids[: end + 1]])[0, -1] for end in range(len(ids))])
    return max(relative_difference(other, whole) for other in (*pair, prefixes))


def raise_fault(error: Exception) -> None:
    """Raise `error` if it says nothing about the model: there is no memory, or the device failed."""
    if is_out_of_memory(error) or is_device_error(error):
        raise error


class StructureCheck:
    """A small random copy of a model, on which the ways to run the model are tried. Its checks raise when there is no
    memory, or when the device fails.
    """

    def __init__(self, small: Any) -> None:
        self._small = small
        self._check = SelfCheck.of(small)

    @classmethod
    def of(cls, module: Any) -> StructureCheck | None:
        """None if no copy can be made in which a mistake would show."""
        for small in _copies(module):
            try:
                if _signal(small) >= LEAST_SIGNAL:
                    return cls(small)
            except FAILURES as error:
                raise_fault(error)
                logger.debug("a small copy of %s cannot run: %s", type(module).__name__, error)
        return None

    @property
    def causal(self) -> bool:
        """Whether no token's logits depend on later tokens."""
        return self._check.noise <= EXACT

    def passes(self, attention: str) -> bool:
        """Whether the copy, run with this attention, computes its own logits in every row."""
        try:
            self._small.set_attn_implementation(attention)
            computed = self._check.logits_of(TargetModel(self._small))
        except FAILURES as error:
            raise_fault(error)
            logger.debug("a copy of %s fails with %s attention: %s", type(self._small).__name__, attention, error)
            return False
        rows = zip(computed, self._check.logits, strict=True)  # a mistake in a single mask shows in a single row
        return all(relative_difference(row[None], own[None]) <= EXACT for row, own in rows)


@torch.inference_mode()
def _signal(small: Any) -> float:
    """How much another first token changes the last logits of a text."""
    vocab = small.config.get_text_config().vocab_size
    ids = [token % vocab for token in range(1, CHECK_TOKENS + 2)]
    window = getattr(small.config.get_text_config(), "sliding_window", None)
    ids = ids[-window:] if window else ids
    left, right = (_own_logits(small, [text])[0, -1:] for text in (ids, [0, *ids[1:]]))
    return relative_difference(left, right) if left.isfinite().all() else 0.0


def _copies(module: Any) -> Iterator[Any]:
    """Random copies of `module` in float32, the smallest first. Which sizes a family can change is found by trying."""
    for shrink in (_narrow, _shallow):
        try:
            config = copy.deepcopy(module.config)
            shrink(config.get_text_config())
            with torch.device("meta"):
                size = sum(weight.numel() for weight in type(module)(copy.deepcopy(config)).parameters())
            if size <= LARGEST_COPY:
                yield _random(type(module), config, module.device)
        except FAILURES as error:
            raise_fault(error)
            logger.debug("%s has no small copy: %s", type(module).__name__, error)


def _random(kind: Any, config: Any, device: torch.device) -> Any:
    """A model with deterministic random weights, large enough that attention shows in the logits."""
    default, generator = torch.get_default_dtype(), torch.Generator().manual_seed(0)
    config.dtype = torch.float32
    with torch.random.fork_rng(devices=[]):
        torch.set_default_dtype(torch.float32)
        try:
            small = kind(config).float().eval()
        finally:
            torch.set_default_dtype(default)
    with torch.no_grad():
        for weight in small.parameters():
            if weight.dim() > 1:
                spread = 1.5 * min(weight.shape[-2:]) ** -0.5
                weight.copy_(torch.randn(weight.shape, generator=generator) * spread)
    return small.to(device)


def _shallow(config: Any) -> None:
    """Reduce to the first layers, at least one of each kind, and few tokens; windows end within the check's text."""
    depth = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or [None] * depth
    count = min(depth, max(LAYERS, *(1 + kinds.index(kind) for kind in set(kinds))))
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == depth:
            setattr(config, name, value[:count])
    config.num_hidden_layers = count
    config.vocab_size = min(config.vocab_size, VOCAB)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, name, None)
    if getattr(config, "sliding_window", None):
        config.sliding_window = min(config.sliding_window, WINDOW)


def _narrow(config: Any) -> None:
    """Reduce to few heads of the same width, in groups of the same size, and narrow layers between them as well."""
    _shallow(config)
    heads = config.num_attention_heads
    groups = heads // (getattr(config, "num_key_value_heads", None) or heads)
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    few = min(2, heads // groups)
    if getattr(config, "num_key_value_heads", None):
        config.num_key_value_heads = few
    config.num_attention_heads = few * groups
    config.hidden_size = few * groups * width
    most = dict.fromkeys(INNER, WIDTH)
    if not getattr(config, "n_group", None):  # experts in groups have to stay as many as the groups need
        most |= dict.fromkeys(EXPERTS, 2 * CHOSEN) | {"num_experts_per_tok": CHOSEN}
    for name, value in most.items():
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, min(getattr(config, name), value))


def _own_logits(module: Any, texts: Sequence[Sequence[int]]) -> Tensor:
    """The logits [texts, tokens, vocab] in float32 of texts of one length, by the model's own code without a cache."""
    ids = torch.tensor([list(text) for text in texts], device=module.device)
    logits: Tensor = module(input_ids=ids, use_cache=False).logits.float()
    return logits


def _path(nodes: list[int], node: int) -> list[int]:
    return [] if node < 0 else [*_path(nodes, CHECK_PARENTS[node]), nodes[node]]

"""From a model reference to a `TargetModel`: files, device, kernels, and a check that trees are verified rightly."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from agentspec.backends.settings import TorchSettings
from agentspec.backends.torch.attention import ATTENTION_NAME
from agentspec.backends.torch.model import TargetModel, layer_windows
from agentspec.backends.torch.packed_linear import pack_linears, unpack_linears
from agentspec.errors import ConfigurationError, ModelUnavailableError
from agentspec.types import Namespace

logger = logging.getLogger(__name__)

CHECK_CHAIN, CHECK_TREE, CHECK_PARENTS = 5, 4, (-1, -1, 0, 1)
CHECK_TOLERANCE = {torch.float32: 2e-3}
LOW_PRECISION_TOLERANCE = 0.5


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to run, its tokenizer, and the hashes that isolate its tokens from other models'."""

    name: str
    target: TargetModel
    tokenizer: Any
    fingerprint: str
    tokenizer_hash: str
    template_hash: str
    packed: int

    def namespace(self, tenant: str) -> Namespace:
        return Namespace(tenant, self.fingerprint, self.tokenizer_hash, self.template_hash)


def load(settings: TorchSettings) -> Loaded:
    """Find, read and prepare the model. Raises `ModelUnavailableError` or `ConfigurationError`."""
    from agentspec.backends.model_store import resolve

    files = resolve(settings.model)
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, device)
    try:
        tokenizer = AutoTokenizer.from_pretrained(files.folder)
        with _quiet():
            module: Any = AutoModelForCausalLM.from_pretrained(files.folder, dtype=dtype, use_safetensors=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelUnavailableError(f"cannot read the model in {str(files.folder)!r}: {error}") from error
    return prepare(module.to(device), tokenizer, name=files.name, fingerprint=files.fingerprint)


def load_tokenizer(model: str) -> tuple[Any, str]:
    """The tokenizer of a model and the hash that its namespaces carry. Raises `ModelUnavailableError`."""
    from agentspec.backends.model_store import resolve

    tokenizer = read_tokenizer(resolve(model).folder)
    return tokenizer, hashes(tokenizer)[0]


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer in a model's folder. Raises `ModelUnavailableError`."""
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ModelUnavailableError(f"cannot read the tokenizer in {str(folder)!r}: {error}") from error


def hashes(tokenizer: Any) -> tuple[str, str]:
    """Of the tokenizer and of its chat template, as namespaces carry them."""
    return _hash(_tokenizer_text(tokenizer)), _hash(str(getattr(tokenizer, "chat_template", None) or ""))


def prepare(module: Any, tokenizer: Any, *, name: str, fingerprint: str) -> Loaded:
    """Pack the weights and choose the attention kernel of a model in memory, which must still compute what it did.

    A model whose trees cannot be verified (recurrent state, attention of an unknown kind) runs without speculation,
    which the log says once. Raises `ModelUnavailableError` for one that cannot be decoded step by step at all.
    """
    module.eval()
    if module.dtype != torch.float32:
        _float32_head(module)
    check = Check.of(module)
    packed = pack_linears(module)
    target = choose_target(module, check)
    if target is None and packed:
        unpack_linears(module)
        packed, target = 0, choose_target(module, check)
    if target is None:
        raise ModelUnavailableError(f"the local engine cannot run {name!r}: {type(module).__name__} is not supported")
    if not target.rewindable:
        logger.warning("%s keeps a state that cannot be rewound: it runs without speculation and prefix reuse", name)
    tokenizer_hash, template_hash = hashes(tokenizer)
    return Loaded(
        name=name,
        target=target,
        tokenizer=tokenizer,
        fingerprint=fingerprint,
        tokenizer_hash=tokenizer_hash,
        template_hash=template_hash,
        packed=packed,
    )


def choose_device(name: str) -> torch.device:
    """`auto` takes a CUDA device where there is one, else the CPU. Raises `ConfigurationError` for unusable names."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigurationError(f"device {name!r} cannot be used here: {error}", param="device") from error
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is float32 on a CPU, whose bfloat16 kernels are slow or missing, and bfloat16 elsewhere."""
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in known:
        raise ConfigurationError(f"dtype must be auto or one of {sorted(known)}, not {name!r}", param="dtype")
    return known[name]


def choose_target(module: Any, check: Check) -> TargetModel | None:
    """The fastest way to run `module` that passes the check; None if there is none."""
    own = module.config._attn_implementation
    stateful = getattr(module, "_is_stateful", False) or layer_windows(module.config.get_text_config()) is None
    for attention in () if stateful else (ATTENTION_NAME, own, "eager"):
        module.set_attn_implementation(attention)
        target = TargetModel(module, rewindable=True)
        if check.passes(target):
            return target
    module.set_attn_implementation(own)
    target = TargetModel(module, rewindable=False)
    return target if check.passes(target) else None


@dataclass(frozen=True, slots=True)
class Check:
    """A few tokens, a tree behind them, and the model's own logits [1 + tree, vocab], each path computed by itself."""

    chain: list[int]
    nodes: list[int]
    logits: Tensor

    @classmethod
    @torch.inference_mode()
    def of(cls, module: Any) -> Check:
        vocab = module.config.get_text_config().vocab_size
        ids = torch.randint(vocab, (CHECK_CHAIN + CHECK_TREE,), generator=torch.Generator().manual_seed(0)).tolist()
        chain, nodes = ids[:CHECK_CHAIN], ids[CHECK_CHAIN:]
        texts = [chain + _path(nodes, CHECK_PARENTS, node) for node in range(-1, len(nodes))]
        return cls(chain, nodes, torch.stack([_own_logits(module, text) for text in texts]))

    def passes(self, target: TargetModel) -> bool:
        try:
            difference = self.difference(target)
        except (TypeError, ValueError, AttributeError, NotImplementedError, LookupError, RuntimeError) as error:
            logger.debug("%s fails with %s attention: %s", type(target.module).__name__, target.attention, error)
            return False
        return difference <= CHECK_TOLERANCE.get(target.dtype, LOW_PRECISION_TOLERANCE)

    def difference(self, target: TargetModel) -> float:
        """Largest logit difference of one forward over rows, chain and tree; of a single token if not rewindable."""
        nodes, parents, known = (self.nodes, CHECK_PARENTS, 2) if target.rewindable else ([], (), CHECK_CHAIN - 1)
        rows = target.new_rows(1)
        target.prefill(rows, self.chain[:known])
        logits = target.forward(rows, self.chain[known:], nodes, parents)
        return float((logits - self.logits[: len(logits)]).abs().max())


def _own_logits(module: Any, ids: list[int]) -> Tensor:
    out = module(input_ids=torch.tensor([ids], device=module.device), use_cache=False)
    logits: Tensor = out.logits[0, -1].float()
    return logits


def _path(nodes: list[int], parents: Sequence[int], node: int) -> list[int]:
    return [] if node < 0 else [*_path(nodes, parents, parents[node]), nodes[node]]


class _Float32Head(nn.Module):
    """An output head computed in float32, since ties in bfloat16 are too many to sample or compare by."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight.detach().float()
        self.bias = None if linear.bias is None else linear.bias.detach().float()

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.float(), self.weight, self.bias)


def _float32_head(module: Any) -> None:
    head = module.get_output_embeddings()
    if type(head) is nn.Linear:
        module.set_output_embeddings(_Float32Head(head))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the library's progress bars, which belong to programs and not to a server's log."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _tokenizer_text(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()

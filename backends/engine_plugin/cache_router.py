"""Opens a server's cache by the operator's settings, and chooses where in it each request is kept."""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from agentspec.backends.engine_plugin.request_state import PrivateCache, RequestCache, RequestState
from agentspec.backends.engine_plugin.settings import DrafterSettings
from agentspec.cache import SuffixCache
from agentspec.cache.settings import without_password
from agentspec.cache.tokens import Tokens
from agentspec.errors import ConfigurationError
from agentspec.types import Namespace

_INCIDENTAL = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")  # keys that do not identify a model

logger = logging.getLogger(__name__)


def close_at_exit(close: Callable[[], None]) -> None:
    """Call `close` when the process ends, also if it was forked by `multiprocessing`."""
    atexit.register(close)
    if multiprocessing.parent_process() is not None:
        Finalize(None, close, exitpriority=10)  # a forked process skips atexit handlers


def open_router(settings: DrafterSettings, model: Any) -> CacheRouter:
    """The router for a server, with its cache open, for a `model` with the fields of vLLM's `ModelConfig`.

    Raises `ConfigurationError` and `CacheError`s.
    """
    chosen, cache = settings.cache, settings.cache.open()
    decode = _decoder(model) if chosen.refuse_patterns else None
    logger.info(
        "agentspec drafts for this server: %s, %s in memory, tenant %r",
        without_password(str(chosen.path)) if chosen.path else "nothing kept on disk (AGENTSPEC_CACHE_PATH is not set)",
        chosen.memory_bytes.human_readable(),
        settings.tenant,
    )
    return CacheRouter(cache, settings, lambda tenant: namespace_of(model, tenant), decode)


class CacheRouter:
    """Chooses the namespace of the cache in which each request is kept."""

    def __init__(
        self,
        cache: SuffixCache,
        settings: DrafterSettings,
        namespace: Callable[[str], Namespace],
        decode: Callable[[Sequence[int]], str] | None,
    ) -> None:
        self._cache = cache
        self._settings = settings
        self._decode = decode
        tenants = {settings.tenant, *settings.salts.values()}
        self._namespaces = {tenant: namespace(tenant) for tenant in tenants}

    def open(self, state: RequestState, prompt: Tokens) -> RequestCache:
        """Open a request's cache in its tenant's namespace, or a private cache if its salt is not configured."""
        salts, request = self._settings.salts, state.request
        if request.salt is not None and request.salt not in salts:
            return PrivateCache(prompt)
        tenant = self._settings.tenant if request.salt is None else salts[request.salt]
        return self._cache.request(
            prompt,
            namespace=of_adapter(self._namespaces[tenant], request.adapter),
            session=request.labels.session,
            store=self._settings.cache.store and request.store,
            decode=self._decode,
        )

    def close(self) -> None:
        self._cache.close()


def namespace_of(model: Any, tenant: str) -> Namespace:
    """The namespace of an engine's model. Replicas that serve the same files from different folders share it."""
    described = {key: value for key, value in model.hf_config.to_dict().items() if key not in _INCIDENTAL}
    fingerprint = json.dumps(described, sort_keys=True, default=str)
    return Namespace(tenant, _hash(fingerprint.encode()), _hash(_tokenizer_bytes(model)))


def of_adapter(namespace: Namespace, adapter: str) -> Namespace:
    """The namespace of the model with a LoRA adapter; `namespace` itself without an adapter."""
    if not adapter:
        return namespace
    return replace(namespace, model_fingerprint=_hash(f"{namespace.model_fingerprint}\0{adapter}".encode()))


def _tokenizer_bytes(model: Any) -> bytes:
    """The content of the tokenizer's file; its name and revision if there is no local file."""
    file = Path(model.tokenizer) / "tokenizer.json"
    if not file.is_file():
        from huggingface_hub import try_to_load_from_cache

        cached = None
        if not Path(model.tokenizer).exists():
            cached = try_to_load_from_cache(model.tokenizer, "tokenizer.json", revision=model.tokenizer_revision)
        if not isinstance(cached, str):
            return f"{model.tokenizer}@{model.tokenizer_revision}".encode()
        file = Path(cached)
    return file.read_bytes()


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _decoder(model: Any) -> Callable[[Sequence[int]], str]:
    """A function from token ids to text, for a cache with `refuse_patterns`."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model.tokenizer, revision=model.tokenizer_revision)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"AGENTSPEC_CACHE__REFUSE_PATTERNS needs the tokenizer of {model.tokenizer!r}: {error}"
        ) from None
    return lambda tokens: str(tokenizer.decode(list(tokens)))

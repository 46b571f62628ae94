"""Opens a server's cache by the operator's settings, and chooses where in it each request is kept."""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from agentspec.backends.engine_plugin.request_state import Deletions, RequestState
from agentspec.backends.engine_plugin.rounds import metric
from agentspec.backends.engine_plugin.settings import DrafterSettings
from agentspec.cache import CacheRequest, SuffixCache
from agentspec.cache.settings import without_password
from agentspec.cache.tokens import Tokens
from agentspec.errors import ConfigurationError
from agentspec.types import Namespace

_INCIDENTAL = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")  # keys that do not identify a model
_TOKENIZERS = "tokenizer.json tekken.json tokenizer.model tiktoken.model qwen.tiktoken vocab.json vocab.txt".split()
_ADAPTERS = "adapter_config.json adapter_model.safetensors adapter_model.bin adapter_model.pt".split()
_PRIVATE = Namespace("private", "", "")  # of requests whose tenant is not known
_SHOWN = 50  # tenants that metrics name; the others, in the order of the settings, are one

logger = logging.getLogger(__name__)


def close_at_exit(close: Callable[[], None]) -> None:
    """Call `close` when the process ends, also if it was forked by `multiprocessing`."""
    atexit.register(close)
    if multiprocessing.parent_process() is not None:
        Finalize(None, close, exitpriority=10)  # a forked process skips atexit handlers


def close_now(close: Callable[[], None]) -> None:
    """Call `close`, of an engine that ends before its process, and let go of what it would have closed."""
    atexit.unregister(close)
    close()


def open_router(settings: DrafterSettings, model: Any, place: str) -> CacheRouter:
    """The router for a server, with its cache open, for a `model` with the fields of vLLM's `ModelConfig`. The log says
    once that agentspec drafts in that `place`.

    Raises `ConfigurationError` and `CacheError`s.
    """
    chosen = settings.cache
    if settings.policies and chosen.path:
        raise ConfigurationError("AGENTSPEC_POLICIES forgets by age, so that it needs a cache of its own: set no path")
    cache = chosen.open()
    decode = _decoder(model) if chosen.refuse_patterns else None
    logger.info(
        "agentspec drafts for this server, %s: %s, %s in memory, tenant %r",
        place,
        without_password(str(chosen.path)) if chosen.path else "this process alone (AGENTSPEC_CACHE_PATH is not set)",
        chosen.memory_bytes.human_readable(),
        settings.tenant,
    )
    router = CacheRouter(cache, settings, lambda tenant: namespace_of(model, tenant, settings.namespace), decode)
    _open.append(router)
    return router


_open: list[CacheRouter] = []


def forget(**conditions: Any) -> int:
    """`SuffixCache.forget` for all servers of this process, of which most have one or none."""
    return sum(router.forget(**conditions) for router in _open)


def new_policy(worker: object = None) -> None:
    """The model of this process has new weights. Workers of vLLM call it as a method."""
    for router in _open:
        router.new_policy()


class CacheRouter:
    """Chooses the namespace of the cache in which each request is kept. `forget` is `SuffixCache.forget`."""

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
        self.forget = cache.forget
        self._used = False  # since the last weights
        self._since = deque([time.time()], maxlen=1 + (settings.policies or 0))  # when each policy began
        cache.on_forget(Deletions.note)
        tenants = dict.fromkeys((settings.tenant, *settings.salts.values()))
        self._namespaces = {tenant: namespace(tenant) for tenant in tenants}
        self._shown = frozenset(list(tenants)[:_SHOWN])

    def open(self, state: RequestState, prompt: Tokens) -> CacheRequest:
        """Open a request's cache in its tenant's namespace. Where its salt is not configured it shares nothing, and
        nothing of it is kept.
        """
        salts, request, self._used = self._settings.salts, state.request, True
        private = request.salt is not None and request.salt not in salts
        namespace = _PRIVATE
        if not private:
            tenant = self._settings.tenant if request.salt is None else salts[request.salt]
            state.tenant = tenant if tenant in self._shown else "other"
            namespace = of_adapter(self._namespaces[tenant], request.adapter, request.adapter_path)
        metric("cache_bytes").set(sum(self._cache.tenant_bytes().values()))
        return self._cache.request(
            prompt,
            namespace=namespace,
            session=request.labels.session,
            store=self._settings.cache.store and request.store and not private,
            share=request.share and not private,
            decode=self._decode,
        )

    def new_policy(self) -> None:
        """The model has new weights: outputs that are older than those of its last `policies` weights are forgotten.

        Weights with which nothing was asked do not count, so that an update may be reported more than once.
        """
        if self._settings.policies is None:
            return
        if not self._used:
            self._since.pop()
        self._since.append(time.time())
        self._used = False
        if len(self._since) == self._since.maxlen:
            self.forget(older_than=time.time() - self._since[0])

    def close(self, hung: bool = False) -> None:
        """Close the cache; leave it behind, without waiting for anything, if it hangs."""
        if self in _open:
            _open.remove(self)
        self._cache.leave_behind("it did not answer when the server ended") if hung else self._cache.close()


def namespace_of(model: Any, tenant: str, name: str = "") -> Namespace:
    """The namespace of an engine's model. Replicas that serve the same files from different folders share it, and so do
    models with the same tokenizer that the operator gives one `name`.
    """
    described = {key: value for key, value in model.hf_config.to_dict().items() if key not in _INCIDENTAL}
    fingerprint = name or json.dumps(described, sort_keys=True, default=str)
    return Namespace(tenant, _hash(fingerprint.encode()), _hash(_tokenizer_bytes(model)))


def of_adapter(namespace: Namespace, adapter: str, path: str) -> Namespace:
    """The namespace of the model with a LoRA adapter; `namespace` itself without an adapter. Adapters of the same
    content in `path` are one, others one by name and path.
    """
    if not adapter:
        return namespace
    files = [file for name in _ADAPTERS if (file := Path(path, name)).is_file()] if path else []
    versions = tuple((file, file.stat().st_mtime_ns, file.stat().st_size) for file in files)
    content = _contents(versions) if len(files) > 1 else f"{adapter}\0{path}"
    return replace(namespace, model_fingerprint=_hash(f"{namespace.model_fingerprint}\0{content}".encode()))


@lru_cache(maxsize=1024)
def _contents(versions: tuple[tuple[Path, int, int], ...]) -> str:
    """A hash of the files. It takes a second for a gigabyte, in the recorder's thread."""
    found = hashlib.sha256()
    for file, _, _ in versions:
        with file.open("rb") as opened:
            found.update(hashlib.file_digest(opened, "sha256").digest())
    return found.hexdigest()


def _tokenizer_bytes(model: Any) -> bytes:
    """The content of the tokenizer's file; its name and revision if there is no local file."""
    folder = Path(model.tokenizer)
    for name in _TOKENIZERS:
        found: Any = folder / name
        if not folder.exists():
            from huggingface_hub import try_to_load_from_cache

            found = try_to_load_from_cache(model.tokenizer, name, revision=model.tokenizer_revision)
        if isinstance(found, str | Path) and Path(found).is_file():
            return Path(found).read_bytes()
    return f"{model.tokenizer}@{model.tokenizer_revision}".encode()


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

"""Finds out by test requests what an upstream can do."""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from agentspec.backends.http import Endpoint, decode_json
from agentspec.backends.openai.metrics import DrafterInfo, read_drafter
from agentspec.backends.openai.server_kind import list_models, owner_of
from agentspec.backends.openai.tokenization import ServerTokenization
from agentspec.backends.settings import OpenAISettings
from agentspec.errors import UpstreamError, UpstreamTimeoutError

logger = logging.getLogger(__name__)
TRIES = 2  # of a request that gets no answer in time: a server may prepare an ability on first use
_QUESTION = [{"role": "user", "content": "Say hello."}]
_BEGUN = [*_QUESTION, {"role": "assistant", "content": "Hello"}]
# Tokenizers that agree on plain words differ in blanks, numbers, other scripts and emoji.
_TELLING = [
    {"role": "user", "content": "def f(x):\n\treturn  x ** 1234567890  # na\u00efve \u6771\u4eac \U0001f642\r\n"}
]


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """The result of a probe. `reachable`: an OpenAI-like server answered. `answers`: a chat request succeeded.

    Without `answers` no ability is reported. `tokenizes`: the server has tokenizer endpoints, as vLLM does, and they
    read a prompt as the model does; `other_tokenizer` if they do not. `error` is the first failure, if any. `drafter`
    is None for servers other than vLLM.
    """

    reachable: bool = False
    error: str | None = None
    models: tuple[str, ...] = ()
    answers: bool = False
    token_ids: bool = False
    continue_final: bool = False
    logprobs: bool = False
    tokenizes: bool = False
    other_tokenizer: bool = False
    context_length: int | None = None
    drafter: DrafterInfo | None = None


async def probe(endpoint: Endpoint, settings: OpenAISettings, timeout: float) -> ProbeReport:
    """Try each ability with requests of one token. Never raises an `UpstreamError`."""
    try:
        listed = await list_models(endpoint, timeout)
    except UpstreamError as error:
        return ProbeReport(reachable=hasattr(error, "upstream_body"), error=error.message)
    models = tuple(str(model["id"]) for model in listed if "id" in model)
    model = settings.model or next(iter(models), None)
    if model is None:
        return ProbeReport(reachable=True, error="the upstream lists no model; set `model` for this backend")
    prober = _Prober(endpoint, model, timeout)
    drafter = None
    is_vllm = settings.server_kind == "vllm" or (settings.server_kind == "auto" and owner_of(listed) == "vllm")
    try:
        plain = await prober.ask(_BEGUN)
    except UpstreamError as error:
        return ProbeReport(reachable=True, error=error.message, models=models)
    tokenizes = await prober.tokenizes()
    other = tokenizes and await prober.has_other_tokenizer()
    if is_vllm:
        drafter = DrafterInfo()
        with suppress(UpstreamError):
            drafter = await read_drafter(endpoint, timeout)
    return ProbeReport(
        reachable=True,
        models=models,
        answers=True,
        token_ids=bool(_choice(await prober.attempt(_QUESTION, return_token_ids=True)).get("token_ids")),
        continue_final=await prober.continues(_prompt_tokens(plain)),
        logprobs=bool(_choice(await prober.attempt(_QUESTION, logprobs=True, top_logprobs=1)).get("logprobs")),
        tokenizes=tokenizes and not other,
        other_tokenizer=other,
        context_length=_context_length(listed, model),
        drafter=drafter,
    )


class _Prober:
    def __init__(self, endpoint: Endpoint, model: str, timeout: float) -> None:
        self.endpoint, self.model, self.timeout = endpoint, model, timeout
        self.tokenization = ServerTokenization(endpoint, model, timeout)

    async def ask(self, messages: list[dict[str, str]], **fields: Any) -> dict[str, Any]:
        body = json.dumps({"model": self.model, "messages": messages, "max_tokens": 1, **fields}).encode()
        content = await self.endpoint.fetch("POST", "/chat/completions", body=body, timeout=self.timeout)
        answer = decode_json(content, self.endpoint.name)
        return answer if isinstance(answer, dict) else {}

    async def tokenizes(self) -> bool:
        with suppress(UpstreamError):
            return await self.tokenization.detokenize(await self.tokenization.tokenize("Hello")) == "Hello"
        return False

    async def has_other_tokenizer(self) -> bool:
        """Whether the tokenizer endpoints read a prompt differently from the model that answers.

        That is so behind a router that sends them to another server. A model that does not show its prompt's ids
        counts as one with the same tokenizer.
        """
        answer = await self.attempt(_TELLING, return_token_ids=True)
        read = answer.get("prompt_token_ids") or _choice(answer).get("prompt_token_ids")
        if not read:
            return False
        written: list[int] = []
        with suppress(UpstreamError):
            written = await self.tokenization.rendered_ids(_TELLING)
        if read != written:
            logger.warning(
                "upstream %s: its tokenizer is not that of its model: no token ids are used", self.endpoint.name
            )
        return bool(read != written)

    async def continues(self, plain: int | None) -> bool:
        """Whether the upstream continues an assistant message; `plain` is the prompt's length without continuation.

        A continued message lacks the end of its turn and the start of the next, so its prompt must be shorter. Success
        alone proves nothing: many upstreams ignore unknown fields.
        """
        answer = await self.attempt(_BEGUN, continue_final_message=True, add_generation_prompt=False)
        continued = _prompt_tokens(answer)
        return plain is not None and continued is not None and continued < plain

    async def attempt(self, messages: list[dict[str, str]], **fields: Any) -> dict[str, Any]:
        """The answer, empty for a refusal."""
        for _ in range(TRIES):
            try:
                return await self.ask(messages, **fields)
            except UpstreamTimeoutError:
                continue
            except UpstreamError:
                break
        return {}


def _context_length(listed: list[dict[str, Any]], model: str) -> int | None:
    """The context length of `model` in tokens, if the server states it as vLLM does."""
    length = next((entry.get("max_model_len") for entry in listed if entry.get("id") == model), None)
    return length if isinstance(length, int) else None


def _choice(answer: dict[str, Any]) -> dict[str, Any]:
    choices = answer.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else {}
    return first if isinstance(first, dict) else {}


def _prompt_tokens(answer: dict[str, Any]) -> int | None:
    usage = answer.get("usage")
    count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    return count if isinstance(count, int) else None

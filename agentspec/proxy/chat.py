"""`/v1/chat/completions`: its request fields and its answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from agentspec.errors import InvalidRequestError
from agentspec.protocol.chat_fields import message_of, take_chat, take_start
from agentspec.protocol.fields import (
    Fields,
    array,
    boolean,
    count,
    mapping,
    string,
    take_sampling,
    take_service,
    take_stream,
    text_parts,
)
from agentspec.proxy.auth import Caller
from agentspec.proxy.responses import Envelope, Gathered, Said, clamped, prompt_logprobs
from agentspec.types import Delta, GenerateRequest, Prompt, TokenLogprob


def parse(body: Mapping[str, Any], caller: Caller, *, max_messages: int) -> tuple[GenerateRequest, bool, bool]:
    """The request, whether to stream, and whether the stream ends with the usage.

    Raises `InvalidRequestError` with `param` for every field that is wrong or that the local engine cannot honour.
    """
    fields = Fields(body)
    model = fields.take("model", string, "")
    messages = _messages(fields.take("messages", array, []), max_messages)
    stream, include_usage = take_stream(fields)
    logprobs = fields.take("logprobs", boolean, False)
    top_logprobs = fields.take("top_logprobs", count, 0)
    if top_logprobs and not logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs = true", param="top_logprobs")
    sampling = take_sampling(fields, max_tokens=_take_max_tokens(fields), logprobs=logprobs, top_logprobs=top_logprobs)
    if stream and sampling.prompt_logprobs is not None:
        raise InvalidRequestError("prompt_logprobs needs stream = false", param="prompt_logprobs")
    plain = GenerateRequest(model=model, messages=messages)
    request = GenerateRequest(
        model=model,
        messages=messages,
        sampling=sampling,
        prediction=fields.take("prediction", _prediction, None),
        return_prompt=fields.take("return_token_ids", boolean, False),
        **take_service(fields, plain),
        **take_chat(fields, plain),
        **take_start(fields, messages[-1]["role"], plain),
        **caller.request_fields,
    )
    fields.take_only("echo", False)
    fields.take_only("best_of", sampling.n)
    fields.finish()
    return request, stream, include_usage


@dataclass(slots=True)
class ChatWriter:
    """Writes chat answers. The role stands in the first chunk's delta of every choice."""

    model: str
    include_usage: bool
    include_speculation: bool
    logprobs: bool
    token_ids: bool = False
    choices: int = 1
    _envelope: Envelope = field(init=False)
    _begun: set[int] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self._envelope = Envelope(
            "", self.model, "chatcmpl", self.include_usage, self.include_speculation, self.choices
        )

    def body(self, answer: Gathered) -> dict[str, Any]:
        self._envelope.kind = "chat.completion"
        choices = [self._whole(index, said) for index, said in answer.all()]
        return self._envelope.whole(choices, answer) | self._prompt(answer.prompt)

    def chunks(self, delta: Delta) -> Iterator[dict[str, Any]]:
        self._envelope.kind = "chat.completion.chunk"
        begins = delta.index not in self._begun
        tokens = self.token_ids and delta.token_ids
        if not (delta.text or delta.logprobs or delta.extra or delta.finish_reason or tokens or begins):
            return
        self._begun.add(delta.index)
        said: dict[str, Any] = {"role": "assistant", "content": ""} if begins else {}
        if delta.text:
            said["content"] = delta.text
        choice = {
            "index": delta.index,
            "delta": {**said, **delta.extra},
            "logprobs": _logprobs(delta.logprobs) if delta.logprobs else None,
            "finish_reason": delta.finish_reason,
            **({"token_ids": list(delta.token_ids)} if self.token_ids else {}),
        }
        yield from self._envelope.chunk(choice, delta, **self._prompt(delta.prompt))

    def _whole(self, index: int, said: Said) -> dict[str, Any]:
        text = "".join(said.text)
        content = None if not text and said.extra.get("tool_calls") else text
        return {
            "index": index,
            "message": {"role": "assistant", "content": content, "refusal": None, **said.extra},
            "logprobs": _logprobs(said.logprobs) if self.logprobs else None,
            "finish_reason": said.finish_reason,
            **({"token_ids": said.token_ids} if self.token_ids else {}),
        }

    def _prompt(self, prompt: Prompt | None) -> dict[str, Any]:
        if prompt is None:
            return {}
        ids = {"prompt_token_ids": list(prompt.token_ids)} if self.token_ids else {}
        return ids if prompt.logprobs is None else {**ids, "prompt_logprobs": prompt_logprobs(prompt)}


def _messages(value: list[Any], limit: int) -> list[dict[str, Any]]:
    if not value:
        raise InvalidRequestError("messages must hold at least one message", param="messages")
    if len(value) > limit:
        raise InvalidRequestError(f"messages has {len(value)} entries; {limit} are allowed", param="messages")
    return [message_of(f"messages[{index}]", message) for index, message in enumerate(value)]


def _take_max_tokens(fields: Fields) -> int | None:
    newer = fields.take("max_completion_tokens", count, None)
    older = fields.take("max_tokens", count, None)
    if None not in (newer, older) and newer != older:
        raise InvalidRequestError("max_tokens and max_completion_tokens differ; send one", param="max_tokens")
    if newer == 0:
        raise InvalidRequestError("max_completion_tokens must be at least 1, not 0", param="max_completion_tokens")
    return older if newer is None else newer


def _prediction(name: str, value: Any) -> str:
    prediction = mapping(name, value)
    if prediction.get("type") != "content":
        raise InvalidRequestError(f"{name}.type must be 'content'", param=f"{name}.type")
    if len(prediction) > 2:
        raise InvalidRequestError(f"{name} holds fields other than type and content", param=name)
    return text_parts(f"{name}.content", prediction.get("content"))


def _logprobs(tokens: list[TokenLogprob] | tuple[TokenLogprob, ...]) -> dict[str, Any]:
    return {"content": [_entry(token) | {"top_logprobs": [_entry(top) for top in token.top]} for token in tokens]}


def _entry(token: TokenLogprob) -> dict[str, Any]:
    text = token.text
    return {"token": text, "logprob": clamped(token.logprob), "bytes": list(text.encode("utf-8", "replace"))}

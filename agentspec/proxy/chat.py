"""`/v1/chat/completions`: its request fields and its answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from agentspec.errors import InvalidRequestError
from agentspec.proxy.answer import Envelope, Gathered, clamped
from agentspec.proxy.fields import (
    Fields,
    array,
    boolean,
    count,
    mapping,
    string,
    take_sampling,
    take_stream,
    text_parts,
)
from agentspec.proxy.labels import Caller
from agentspec.types import Delta, GenerateRequest, TokenLogprob

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
# `name` labels a speaker for hosted models; no chat template that the local engine runs reads it.
_MESSAGE_FIELDS = frozenset({"role", "content", "name"})


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
    request = GenerateRequest(
        model=model,
        messages=messages,
        sampling=take_sampling(
            fields, max_tokens=_take_max_tokens(fields), logprobs=logprobs, top_logprobs=top_logprobs
        ),
        continue_final=_take_continue_final(fields, messages),
        prediction=fields.take("prediction", _prediction, None),
        **caller.request_fields,
    )
    _take_empty(fields)
    fields.finish()
    return request, stream, include_usage


@dataclass(slots=True)
class ChatWriter:
    """Writes chat answers. The role stands in the first chunk's delta."""

    model: str
    include_usage: bool
    include_speculation: bool
    logprobs: bool
    _envelope: Envelope = field(init=False)
    _begun: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._envelope = Envelope("", self.model, "chatcmpl", self.include_usage, self.include_speculation)

    def body(self, answer: Gathered) -> dict[str, Any]:
        self._envelope.kind = "chat.completion"
        message = {"role": "assistant", "content": "".join(answer.text), "refusal": None, **answer.extra}
        choice = {
            "index": 0,
            "message": message,
            "logprobs": _logprobs(answer.logprobs) if self.logprobs else None,
            "finish_reason": answer.finish_reason,
        }
        return self._envelope.whole(choice, answer)

    def chunks(self, delta: Delta) -> Iterator[dict[str, Any]]:
        self._envelope.kind = "chat.completion.chunk"
        if not (delta.text or delta.logprobs or delta.extra or delta.finish_reason or not self._begun):
            return
        said: dict[str, Any] = {} if self._begun else {"role": "assistant", "content": ""}
        self._begun = True
        if delta.text:
            said["content"] = delta.text
        choice = {
            "index": 0,
            "delta": {**said, **delta.extra},
            "logprobs": _logprobs(delta.logprobs) if delta.logprobs else None,
            "finish_reason": delta.finish_reason,
        }
        yield from self._envelope.chunk(choice, delta)


def _messages(value: list[Any], limit: int) -> list[dict[str, Any]]:
    if not value:
        raise InvalidRequestError("messages must hold at least one message", param="messages")
    if len(value) > limit:
        raise InvalidRequestError(f"messages has {len(value)} entries; {limit} are allowed", param="messages")
    return [_message(f"messages[{index}]", message) for index, message in enumerate(value)]


def _message(name: str, value: Any) -> dict[str, Any]:
    message = mapping(name, value)
    role = string(f"{name}.role", message.get("role"))
    if role not in ROLES:
        known = ", ".join(ROLES)
        raise InvalidRequestError(f"{name}.role is not supported by this model; known: {known}", param=f"{name}.role")
    for key, given in message.items():
        if key not in _MESSAGE_FIELDS and given not in (None, [], ""):
            shown = f"{name}.{key[:80]}".encode("ascii", "replace").decode()
            raise InvalidRequestError(f"{shown} is not supported by this model", param=shown)
    return {"role": ROLES[role], "content": text_parts(f"{name}.content", message.get("content"))}


def _take_max_tokens(fields: Fields) -> int | None:
    newer = fields.take("max_completion_tokens", count, None)
    older = fields.take("max_tokens", count, None)
    if None not in (newer, older) and newer != older:
        raise InvalidRequestError("max_tokens and max_completion_tokens differ; send one", param="max_tokens")
    if newer == 0:
        raise InvalidRequestError("max_completion_tokens must be at least 1, not 0", param="max_completion_tokens")
    return older if newer is None else newer


def _take_continue_final(fields: Fields, messages: list[dict[str, Any]]) -> bool:
    """vLLM's rule: a continued message leaves no room for the start of a new one, and a plain one needs it."""
    continued = fields.take("continue_final_message", boolean, False)
    started = fields.take("add_generation_prompt", boolean, not continued)
    if continued == started:
        raise InvalidRequestError(
            "set either continue_final_message or add_generation_prompt, not both and not neither",
            param="add_generation_prompt",
        )
    if continued and messages[-1]["role"] != "assistant":
        raise InvalidRequestError(
            "continue_final_message needs a last message of role assistant", param="continue_final_message"
        )
    return continued


def _prediction(name: str, value: Any) -> str:
    prediction = mapping(name, value)
    if prediction.get("type") != "content":
        raise InvalidRequestError(f"{name}.type must be 'content'", param=f"{name}.type")
    if len(prediction) > 2:
        raise InvalidRequestError(f"{name} holds fields other than type and content", param=name)
    return text_parts(f"{name}.content", prediction.get("content"))


def _take_empty(fields: Fields) -> None:
    """What asks for nothing beyond one plain text answer is accepted in that form alone."""
    fields.take_only("n", 1)
    fields.take_only("tools", [])
    fields.take_only("functions", [])
    fields.take_only("tool_choice", "none", "auto")
    fields.take_only("function_call", "none", "auto")
    fields.take("parallel_tool_calls", boolean, True)
    fields.take_only("response_format", {"type": "text"})
    fields.take_only("modalities", ["text"])
    fields.take_only("reasoning_effort", "none")
    fields.take_only("chat_template_kwargs", {})


def _logprobs(tokens: list[TokenLogprob] | tuple[TokenLogprob, ...]) -> dict[str, Any]:
    return {"content": [_entry(token) | {"top_logprobs": [_entry(top) for top in token.top]} for token in tokens]}


def _entry(token: TokenLogprob) -> dict[str, Any]:
    text = token.text
    return {"token": text, "logprob": clamped(token.logprob), "bytes": list(text.encode("utf-8", "replace"))}

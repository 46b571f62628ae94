"""Our vocabulary in OpenAI's words: a request as a body, the chunks of an answer as deltas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, cast
from urllib.parse import quote

from agentspec.errors import InvalidRequestError, UpstreamError
from agentspec.types import (
    Delta,
    FinishReason,
    GenerateRequest,
    RetrievalSpeculation,
    SamplingParams,
    Speculation,
    StepSpeculation,
    StructuredOutputs,
    TokenLogprob,
    Usage,
)

UNKNOWN_TOKEN = -1  # token id of a logprob whose upstream names tokens by text alone
_PRINTABLE = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) != "%")
_MOST = 2**53  # what a JSON number surely holds
_DEFAULTS = SamplingParams()
_FINISH: dict[str, FinishReason] = {"function_call": "tool_calls", "abort": "cancelled"}
_KNOWN_FINISH = ("stop", "length", "tool_calls", "content_filter", "cancelled")
_MESSAGE_FIELDS = ("role", "content")


def payload(request: GenerateRequest, model: str) -> tuple[str, dict[str, Any]]:
    """The path and the body of `request`, streaming and with usage asked for.

    Sampling fields that stand at OpenAI's default are left out, so that the upstream's own configuration holds.
    `extra` is merged in but cannot change what is set here. A `prediction` stays here unless `extra` carries one.
    Raises `InvalidRequestError` for `n` above 1, whose further choices a delta cannot carry.
    """
    choices = request.extra.get("n", request.sampling.n)
    if choices not in (None, 1):
        raise InvalidRequestError(f"n must be 1, not {choices!r}", param="n")
    chat = request.messages is not None
    body = dict(request.extra)
    body |= _sampling(request.sampling, chat=chat)
    body |= {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    if chat:
        body["messages"] = [dict(message) for message in request.messages or ()]
    else:
        body["prompt"] = request.text if request.text is not None else list(request.token_ids or ())
    if request.continue_final:
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    body |= _chat(request) if chat else {}
    if request.return_prompt:
        body["return_token_ids"] = True
    return "/chat/completions" if chat else "/completions", body


def _chat(request: GenerateRequest) -> dict[str, Any]:
    """What only chat requests say; as everywhere here, defaults are left unsaid."""
    body: dict[str, Any] = {}
    if not (request.start_answer or request.continue_final):
        body["add_generation_prompt"] = False
    if request.tools:
        choice: Any = request.tool_choice
        if choice not in ("auto", "none", "required"):
            choice = {"type": "function", "function": {"name": choice}}
        body |= {"tools": [dict(tool) for tool in request.tools], "tool_choice": choice}
        body |= {} if request.parallel_tool_calls else {"parallel_tool_calls": False}
    if request.template_arguments:
        body["chat_template_kwargs"] = dict(request.template_arguments)
    if not request.split_reasoning:
        body["include_reasoning"] = False
    return body


def _form(form: StructuredOutputs) -> dict[str, Any]:
    """A JSON form as OpenAI asks for it, any other as vLLM does."""
    if form.json_object:
        return {"response_format": {"type": "json_object"}}
    if isinstance(form.json, Mapping):
        described = {"name": "answer", "schema": dict(form.json)}
        return {"response_format": {"type": "json_schema", "json_schema": described}}
    given = {field.name: getattr(form, field.name) for field in fields(form)}
    return {"structured_outputs": {name: value for name, value in given.items() if value is not None}}


def label_headers(request: GenerateRequest) -> dict[str, str]:
    """The labels and switches as headers. Blanks, `%` and what is not ASCII are percent-encoded."""
    labels = {field.name: getattr(request.labels, field.name) for field in fields(request.labels)}
    headers = {f"x-agentspec-{name}": quote(value, safe=_PRINTABLE) for name, value in labels.items() if value}
    if not request.speculation:
        headers["x-agentspec-speculation"] = "off"
    if not request.store:
        headers["x-agentspec-store"] = "off"
    return headers


def to_delta(chunk: Any) -> Delta:
    """One chunk of a stream, or a whole answer, as a delta. Only the first choice counts.

    Raises `UpstreamError` for a chunk of the wrong shape and for one that reports an error.
    """
    try:
        if chunk.get("error"):
            raise _reported(chunk["error"])
        choice = _first_choice(chunk.get("choices") or ())
        message = choice.get("delta") or choice.get("message") or {}
        return Delta(
            text=_text(message.get("content")) + _text(choice.get("text")),
            token_ids=tuple(int(token) for token in choice.get("token_ids") or ()),
            logprobs=_logprobs(choice.get("logprobs")),
            finish_reason=_finish_reason(choice.get("finish_reason")),
            usage=_usage(chunk.get("usage")),
            speculation=_speculation(chunk.get("speculation")),
            extra={key: value for key, value in message.items() if key not in _MESSAGE_FIELDS and value is not None},
        )
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError):
        raise UpstreamError("the upstream sent a chunk of the wrong shape") from None


def _first_choice(choices: Iterable[Any]) -> Mapping[str, Any]:
    return next((choice for choice in choices if choice.get("index") in (0, None)), {})


def _sampling(sampling: SamplingParams, *, chat: bool) -> dict[str, Any]:
    apart = ("logprobs", "top_logprobs", "structured_outputs")
    names = [field.name for field in fields(sampling) if field.name not in apart]
    body = {name: getattr(sampling, name) for name in names if getattr(sampling, name) != getattr(_DEFAULTS, name)}
    if "logit_bias" in body:
        body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if sampling.logprobs:
        body |= (
            {"logprobs": True, "top_logprobs": sampling.top_logprobs} if chat else {"logprobs": sampling.top_logprobs}
        )
    if sampling.structured_outputs is not None:
        body |= _form(sampling.structured_outputs)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in body.items()}


def _text(value: object) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    raise TypeError(value)


def _finish_reason(value: object) -> FinishReason | None:
    if value is None or value == "":
        return None
    return cast(FinishReason, value) if value in _KNOWN_FINISH else _FINISH.get(str(value), "stop")


def _usage(value: Mapping[str, Any] | None) -> Usage | None:
    if not value:
        return None
    prompt = value.get("prompt_tokens_details") or {}
    completion = value.get("completion_tokens_details") or {}
    return Usage(
        prompt_tokens=_count(value.get("prompt_tokens")),
        completion_tokens=_count(value.get("completion_tokens")),
        cached_tokens=_count(prompt.get("cached_tokens")),
        accepted_prediction_tokens=completion.get("accepted_prediction_tokens"),
        rejected_prediction_tokens=completion.get("rejected_prediction_tokens"),
    )


def _count(value: Any) -> int:
    return min(max(0, int(value or 0)), _MOST)


def _speculation(value: Mapping[str, Any] | None) -> Speculation | None:
    """The object of an agentspec gateway upstream; another product's object of this name is left alone."""
    if not value or not all(field.name in value for field in fields(Speculation)):
        return None
    counts: dict[str, Any] = {
        "drafted": _count(value["drafted"]),
        "accepted": _count(value["accepted"]),
        "steps": _count(value["steps"]),
        "estimated_seconds_saved": float(value["estimated_seconds_saved"]),
    }
    if "strategy" not in value:
        return Speculation(**counts)
    kind = RetrievalSpeculation if "hit_rate" in value else StepSpeculation
    more = {field.name: value[field.name] for field in fields(kind) if field.name in value}
    return kind(**(more | counts))


def _logprobs(value: Mapping[str, Any] | None) -> tuple[TokenLogprob, ...]:
    if not value:
        return ()
    if "tokens" in value:
        tops = value.get("top_logprobs") or [None] * len(value["tokens"])
        return tuple(
            _token(token, logprob, tuple(_token(*item) for item in (top or {}).items()))
            for token, logprob, top in zip(value["tokens"], value["token_logprobs"], tops, strict=True)
        )
    return tuple(
        _token(
            item["token"],
            item["logprob"],
            tuple(_token(top["token"], top["logprob"]) for top in item.get("top_logprobs") or ()),
        )
        for item in value.get("content") or ()
    )


def _token(text: str, logprob: float | None, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
    return TokenLogprob(UNKNOWN_TOKEN, _text(text), 0.0 if logprob is None else float(logprob), top)


def _reported(error: Any) -> UpstreamError:
    message = error.get("message") if isinstance(error, Mapping) else error
    return UpstreamError(f"the upstream broke off with an error: {str(message)[:2000]}")

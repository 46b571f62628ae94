"""Converts a request to the JSON body that an OpenAI-compatible endpoint takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from agentspec.errors import InvalidRequestError
from agentspec.types import GenerateRequest, SamplingParams, StructuredOutputs


def payload(request: GenerateRequest, model: str) -> tuple[str, dict[str, Any]]:
    """The path and the body of `request`, which ask for a stream with usage.

    Sampling fields that nobody gave are left out, so that the upstream's own defaults apply. `extra` is
    merged in but cannot change the fields set here. The request's `prediction` is not sent unless `extra` has one.
    Raises `InvalidRequestError` for `n` above 1, since a delta cannot carry further choices.
    """
    choices = request.extra.get("n", request.sampling.n)
    if choices not in (None, 1):
        raise InvalidRequestError(
            f"n must be 1, not {choices!r}: an endpoint is asked for one answer at a time", param="n"
        )
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
    """The fields that only chat requests have; defaults are left out."""
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
    return body


def _form(form: StructuredOutputs) -> dict[str, Any]:
    """A structured output in the body: JSON forms in OpenAI's fields, other forms in vLLM's."""
    if form.json_object:
        return {"response_format": {"type": "json_object"}}
    if isinstance(form.json, Mapping):
        described = {"name": "answer", "schema": dict(form.json)}
        return {"response_format": {"type": "json_schema", "json_schema": described}}
    return {"structured_outputs": form.given}


def _sampling(sampling: SamplingParams, *, chat: bool) -> dict[str, Any]:
    apart = ("logprobs", "top_logprobs", "structured_outputs")
    names = [field.name for field in fields(sampling) if field.name not in apart]
    body = {name: getattr(sampling, name) for name in names if sampling.is_given(name)}
    if "logit_bias" in body:
        body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if sampling.logprobs:
        body |= (
            {"logprobs": True, "top_logprobs": sampling.top_logprobs} if chat else {"logprobs": sampling.top_logprobs}
        )
    if sampling.structured_outputs is not None:
        body |= _form(sampling.structured_outputs)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in body.items()}

"""Parses the bodies of `/v1/chat/completions`, and has the sampling fields that all APIs share.

Field names and meanings are OpenAI's and vLLM's. Every field is acted on, known to be inert, or refused: no field that
would change the answer is silently ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field

from agentspec.errors import InvalidRequestError
from agentspec.protocol.forms import FORM_FIELDS, TemplateArguments, parse_form
from agentspec.protocol.messages import parse_message, parse_prediction
from agentspec.protocol.tools import parse_tool_choice, parse_tools
from agentspec.protocol.validation import (
    MAX_TOKEN_ID,
    Body,
    Closed,
    Count,
    FewTokenIds,
    Number,
    Refused,
    Text,
    Texts,
    checked_length,
    must,
    one_of,
    only,
)
from agentspec.types import GenerateRequest, SamplingParams

T = TypeVar("T")

MAX_BIASES = 1024
MAX_TOOLS = 128
MAX_MESSAGES = 2048  # of a chat, or items of a response and those that it continues
MAX_TOP_LOGPROBS = 20
_HIGH = dict.fromkeys(("high", "xhigh", "max"), "high")
EFFORTS = {"none": None, "minimal": "low", "low": "low", "medium": "medium", **_HIGH}
"""The efforts of all APIs, and the nearest of the three that chat templates know; None: no reasoning."""


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """What an answer contains next to its text; `usage` is a stream's last chunk."""

    usage: bool = False
    token_ids: bool = False
    token_sources: bool = False


class _StreamOptions(Closed):
    include_usage: bool = False
    include_obfuscation: Annotated[Any, only(False)] = None
    continuous_usage_stats: Annotated[Any, only(False)] = None


def _token_id(key: str | int) -> int:
    if isinstance(key, int):  # of a client in this process
        return key
    if not (key.isascii() and key.isdigit() and len(key) < 11 and int(key) <= MAX_TOKEN_ID):
        raise Refused(" keys must be token ids")
    return int(key)


def _few_biases(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_BIASES:  # pydantic would first look for an error in every entry
        raise Refused(f" has {len(value)} entries; {MAX_BIASES} are allowed")
    return value


Biases = Annotated[dict[Annotated[int, BeforeValidator(_token_id)], Number], BeforeValidator(_few_biases)]


class SamplingFields(BaseModel):
    """The sampling fields that all APIs and `ChatAgentSpec` call so; `SamplingParams` has their ranges.

    A client may turn `top_k` off with -1, and send one stop string without an array.
    """

    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Annotated[int, AfterValidator(lambda top_k: max(0, top_k))] | None = None
    min_p: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    logit_bias: Biases | None = None
    seed: Annotated[int, must(lambda seed: -(2**63) <= seed < 2**63, " must be a 64-bit integer")] | None = None
    stop: Annotated[Texts, BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop)] | None = None
    stop_token_ids: FewTokenIds | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    bad_words: Texts | None = None


SAMPLED = frozenset(SamplingFields.model_fields)


class _CommonBody(SamplingFields, Body):
    """The fields of both routes that an in-process client may also set in `extra`."""

    max_tokens: Count | None = None
    n: Count | None = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    priority: Count | None = None
    return_token_ids: bool | None = None
    return_token_sources: bool | None = None
    stream_options: _StreamOptions = _StreamOptions()
    # Accepted only with the value that describes what the engine does anyway.
    skip_special_tokens: Annotated[Any, only(True)] = None
    spaces_between_special_tokens: Annotated[Any, only(True)] = None
    include_stop_str_in_output: Annotated[Any, only(False)] = None
    use_beam_search: Annotated[Any, only(False)] = None
    length_penalty: Annotated[Any, only(1.0)] = None

    def sampling(self) -> dict[str, Any]:
        """The members of `SamplingParams` that the request sets, with the form of its answers."""
        given = self.given("max_tokens", "n", *SAMPLED)
        forms = self.given(*FORM_FIELDS)
        return given if not forms or (form := parse_form(forms)) is None else {**given, "structured_outputs": form}

    def service(self) -> dict[str, Any]:
        """The scheduling fields, where a client's `priority` may only put it after others, and `token_sources`."""
        wanted = {"token_sources": True} if self.return_token_sources else {}
        return {**self.given("priority"), **wanted}


class GenerationBody(_CommonBody):
    """The fields of both routes."""

    model: Text = ""
    stream: bool = False
    best_of: Annotated[Any, only(1)] = None

    def answer_format(self) -> AnswerFormat:
        check_stream_options(self.stream_options, stream=self.stream)
        asked = bool(self.return_token_ids), bool(self.return_token_sources)
        return AnswerFormat(self.stream_options.include_usage, *asked)


def check_stream_options(options: Closed, *, stream: bool) -> None:
    """Refuse options of a stream that was not requested."""
    if options.model_fields_set and not stream:
        raise InvalidRequestError("stream_options needs stream = true", param="stream_options")


class _ChatFields(Body):
    """The fields besides messages that only chat requests have."""

    tools: Annotated[list[Any], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[Any, only([])] = None
    function_call: Annotated[Any, only("none", "auto")] = None
    modalities: Annotated[Any, only(["text"])] = None
    web_search_options: Annotated[Any, must(lambda one: not one, " asks for a search that no model here can do")] = None
    reasoning_effort: Annotated[Text, one_of(*EFFORTS)] | None = None
    verbosity: Annotated[Any, only("low", "medium", "high")] = None  # no chat template knows it
    chat_template_kwargs: TemplateArguments | None = None
    include_reasoning: bool | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    def chat(self, plain: GenerateRequest) -> dict[str, Any]:
        """The fields of a `GenerateRequest` that only chat requests have; a field missing here comes from `plain`."""
        tools = plain.tools if self.tools is None else parse_tools(self.tools)
        choice = plain.tool_choice
        if self.tool_choice is not None:
            choice, tools = parse_tool_choice(self.tool_choice, tools)
        names = [tool["function"]["name"] for tool in tools]
        if choice not in ("auto", "none") and (not tools or choice not in ("required", *names)):
            raise InvalidRequestError("tool_choice asks for a tool that tools does not have", param="tool_choice")
        return {
            "tools": tools,
            "tool_choice": choice if tools else "auto",
            "parallel_tool_calls": _or(self.parallel_tool_calls, plain.parallel_tool_calls) or not tools,
            "template_arguments": self._effort() | dict(_or(self.chat_template_kwargs, plain.template_arguments)),
            "include_reasoning": _or(self.include_reasoning, plain.include_reasoning),
            **self._start(plain),
        }

    def _effort(self) -> dict[str, Any]:
        """`reasoning_effort` as chat templates know it; one that has no such argument is not changed by it."""
        effort = None if self.reasoning_effort is None else EFFORTS[self.reasoning_effort]
        if effort is None:
            return {} if self.reasoning_effort is None else {"enable_thinking": False}
        return {"enable_thinking": True, "reasoning_effort": effort}

    def _start(self, plain: GenerateRequest) -> dict[str, Any]:
        """Whether the model continues the last message, and whether the template opens an answer.

        As in vLLM, a request cannot both continue a message and start a new one.
        """
        continued = _or(self.continue_final_message, plain.continue_final)
        started = _or(self.add_generation_prompt, plain.start_answer and not continued)
        if continued and started:
            message = "set either continue_final_message or add_generation_prompt, not both"
            raise InvalidRequestError(message, param="add_generation_prompt")
        if continued and (plain.messages or [{}])[-1].get("role") != "assistant":
            message = "continue_final_message needs a last message of role assistant"
            raise InvalidRequestError(message, param="continue_final_message")
        return {"continue_final": continued, "start_answer": started or continued}


class _ChatBody(_ChatFields, GenerationBody):
    messages: list[Any] | None = None
    logprobs: bool = False
    top_logprobs: Count = 0
    max_completion_tokens: Count | None = None
    prediction: Any = None
    echo: Annotated[Any, only(False)] = None

    def most_tokens(self) -> int | None:
        newer, older = self.max_completion_tokens, self.max_tokens
        if None not in (newer, older) and newer != older:
            raise InvalidRequestError("max_tokens and max_completion_tokens differ; send one", param="max_tokens")
        if newer == 0:
            message = "max_completion_tokens must be at least 1, not 0"
            raise InvalidRequestError(message, param="max_completion_tokens")
        return older if newer is None else newer


def parse_chat(body: Mapping[str, Any], *, max_messages: int = MAX_MESSAGES) -> tuple[GenerateRequest, AnswerFormat]:
    """Parse a chat request. Raises `InvalidRequestError` with `param` for a field that is wrong or unsupported."""
    fields = _ChatBody.parse(body)
    plain = GenerateRequest(model=fields.model, messages=_messages(fields.messages or [], max_messages))
    form = fields.answer_format()
    if fields.top_logprobs and not fields.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs = true", param="top_logprobs")
    shown = {"logprobs": fields.logprobs, "top_logprobs": fields.top_logprobs}
    sampling = SamplingParams(**{**fields.sampling(), "max_tokens": fields.most_tokens(), **shown})
    request = replace(
        plain,
        sampling=sampling,
        prediction=None if fields.prediction is None else parse_prediction(fields.prediction),
        return_prompt=form.token_ids,
        **fields.service(),
        **fields.chat(plain),
    )
    return request, form


class _ChatExtra(_ChatFields, _CommonBody):
    """The fields that an in-process client may set in `extra` of a chat request."""


def with_extra(request: GenerateRequest) -> GenerateRequest:
    """`request` with the fields of its `extra` that the local engine supports moved to their own places.

    Raises `InvalidRequestError` for unsupported fields: no field that would change the answer is silently ignored.
    """
    if not request.extra:
        return request
    fields = (_CommonBody if request.messages is None else _ChatExtra).parse(request.extra)
    changed = {
        "sampling": replace(request.sampling, **fields.sampling()),
        "return_prompt": _or(fields.return_token_ids, request.return_prompt),
        **fields.service(),
        **(fields.chat(request) if isinstance(fields, _ChatExtra) else {}),
    }
    return replace(request, extra={}, **changed)


def _messages(value: list[Any], limit: int) -> list[dict[str, Any]]:
    if not checked_length(value, "messages", limit):
        raise InvalidRequestError("messages must hold at least one message", param="messages")
    return [parse_message(message, f"messages[{index}]") for index, message in enumerate(value)]


def _or(given: T | None, default: T) -> T:
    return default if given is None else given

"""`ChatAgentSpec`: one LangChain chat model for the in-process runtime and for a remote gateway or upstream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from functools import partial
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LangSmithParams, LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from langchain_core.utils import secret_from_env
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import ConfigDict, Field, SecretStr, field_validator

from agentspec.backends.base import Tokenization
from agentspec.backends.openai.backend import OpenAIBackend
from agentspec.backends.pool.backend import PoolBackend
from agentspec.background import call_sync, iterate_async, iterate_sync
from agentspec.client import DEFAULT_MODEL, OWN, SAMPLING, call_of, checked_url, counted, runtime_for
from agentspec.errors import ConfigurationError, InvalidRequestError, UpstreamStatusError
from agentspec.langchain import structured_output
from agentspec.langchain.labels import labels_of_call
from agentspec.langchain.messages import PROVIDER, AnswerChunks, to_message, to_openai, to_tool_choice
from agentspec.protocol.requests import SamplingFields
from agentspec.runtime import Runtime
from agentspec.step.scope import current_policy
from agentspec.types import Delta, GenerateRequest, StructuredOutputs

_FIXED = ("base_url", "api_key", "runtime", "timeout", "max_retries")
_NO_ROUTE = (404, 405, 501)


class ChatAgentSpec(SamplingFields, BaseChatModel):
    """A chat model that runs in this process or is served by an OpenAI-compatible endpoint.

    `ChatAgentSpec(model="smollm2-135m")` runs the model in this process, on `background.shared_runtime` or on the
    `runtime` passed, which the caller closes. With `base_url` it calls an agentspec gateway, or any OpenAI-compatible
    endpoint, with `api_key` (or `$AGENTSPEC_API_KEY`).

    Every sampling option may be set here or per call. Options that `SamplingParams` lacks go to the endpoint unchanged;
    the local engine refuses those that it does not support. The `model` of a surrounding step applies unless the call
    names one. Where neither this object nor the call sets `speculation` or `session`, the step's apply, and LangGraph's
    `thread_id` as the last choice for the session. After an answer that calls tools the local engine reads what is
    known of the next prompt. Raises `AgentSpecError`s.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid", allow_inf_nan=False)

    model: str = DEFAULT_MODEL
    base_url: str | None = None
    api_key: SecretStr | None = Field(default_factory=secret_from_env("AGENTSPEC_API_KEY", default=None))
    runtime: Runtime | None = Field(default=None, exclude=True, repr=False)

    max_tokens: int | None = None
    n: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    structured_outputs: StructuredOutputs | None = None

    prediction: str | None = None
    speculation: bool | None = None
    session: str | None = None
    store: bool = True
    extra_body: dict[str, Any] = Field(default_factory=dict)
    streaming: bool = False  # LangChain's option: `invoke` reports tokens to callbacks as they arrive
    timeout: float | None = Field(default=None, gt=0)
    max_retries: int = Field(default=2, ge=0)

    @field_validator("base_url")
    @classmethod
    def _is_url(cls, url: str | None) -> str | None:
        return checked_url(url)

    @property
    def _llm_type(self) -> str:
        return "chat-agentspec"

    @property
    def lc_secrets(self) -> dict[str, str]:
        return {"api_key": "AGENTSPEC_API_KEY"}

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """What LangChain's cache distinguishes calls by: also the model of the step around them."""
        named: dict[str, Any] = {"model": current_policy().model or self.model}
        named |= {name: getattr(self, name) for name in ("base_url", *SAMPLING, "prediction", "extra_body")}
        return {name: value for name, value in named.items() if value not in (None, {})}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **kwargs)
        params["ls_provider"] = PROVIDER
        params["ls_model_name"] = kwargs.get("model") or current_policy().model or self.model
        return params

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call = self._request(messages, stop, run_manager, kwargs)
        chunks = AnswerChunks(call.model)
        return _result([(delta.index, chunks.chunk(delta)) for delta in iterate_sync(self._answer(call))])

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call = self._request(messages, stop, run_manager, kwargs)
        chunks, deltas = AnswerChunks(call.model), iterate_async(self._answer(call))
        return _result([(delta.index, chunks.chunk(delta)) async for delta in deltas])

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        call = _with_one_choice(self._request(messages, stop, run_manager, kwargs))
        chunks = AnswerChunks(call.model)
        with closing(iterate_sync(self._answer(call))) as deltas:
            for delta in deltas:
                chunk = ChatGenerationChunk(message=chunks.chunk(delta))
                if run_manager is not None:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        call = _with_one_choice(self._request(messages, stop, run_manager, kwargs))
        chunks = AnswerChunks(call.model)
        async with aclosing(iterate_async(self._answer(call))) as deltas:
            async for delta in deltas:
                chunk = ChatGenerationChunk(message=chunks.chunk(delta))
                if run_manager is not None:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: dict[str, Any] | str | bool | None = None,
        strict: bool | None = None,
        parallel_tool_calls: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """This model with tools that it may call. The local engine supports tools; an endpoint must as well.

        `tool_choice` is a tool's name, "auto", "none", "required" (also "any" and True), or OpenAI's object.
        """
        converted = [convert_to_openai_tool(tool, strict=strict) for tool in tools]
        if tool_choice:
            names = [tool.get("function", tool).get("name", "") for tool in converted]
            kwargs["tool_choice"] = to_tool_choice(tool_choice, names)
        if parallel_tool_calls is not None:
            kwargs["parallel_tool_calls"] = parallel_tool_calls
        return self.bind(tools=converted, **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        include_raw: bool = False,
        method: structured_output.Method = "function_calling",
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """This model with answers in `schema`: by a tool call, by a JSON schema, or as any JSON (`json_mode`).

        The local engine supports all three; an endpoint must support the method. Raises `OutputParserException` where
        the answer was cut off, as by `max_tokens`.
        """
        if kwargs or method not in ("function_calling", "json_schema", "json_mode"):
            raise InvalidRequestError(f"with_structured_output does not take {kwargs or method!r}")
        traced = {"kwargs": {"method": method, "strict": strict}, "schema": schema}
        if method == "function_calling":
            llm = self.bind_tools([schema], tool_choice="any", strict=strict, ls_structured_output_format=traced)
            parser = structured_output.tool_parser(schema)
        else:
            asked = structured_output.response_format(schema, method, strict)
            llm = self.bind(response_format=asked, ls_structured_output_format=traced)
            parser = structured_output.json_parser(schema)
        parser = structured_output.whole_only(parser)
        return structured_output.with_raw(llm, parser) if include_raw else llm | parser

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of `text` by `custom_get_token_ids` or else the model's tokenizer. Raises `ConfigurationError`."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        model = current_policy().model or self.model
        return call_sync(_token_ids, self._runtime(model), model, text) if text else []

    def _request(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None,
        run_manager: CallbackManagerForLLMRun | AsyncCallbackManagerForLLMRun | None,
        options: Mapping[str, Any],
    ) -> GenerateRequest:
        """The request of one call. Its labels are read here, in the caller's context."""
        chosen, extra = self._options(options, stop, current_policy().model)
        return call_of(
            chosen,
            labels_of_call(chosen["session"], run_manager.metadata if run_manager else None),
            extra,
            remote=self.base_url is not None,
            messages=to_openai(messages),
        )

    def _options(
        self, given: Mapping[str, Any], stop: list[str] | None, model: str | None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The options of a call that are known here, by name, and those to pass on. What the call has `given` comes
        before the `model` of the step, and that before this object's own. Raises `InvalidRequestError`.
        """
        left = {name: value for name, value in given.items() if value is not None and name != "stream"}
        if fixed := [name for name in _FIXED if name in left]:
            raise InvalidRequestError(f"{fixed[0]} is set once, on ChatAgentSpec, not per call", param=fixed[0])
        if stop is not None:
            left["stop"] = stop
        if model is not None:
            left.setdefault("model", model)
        known = {name: left.pop(name, getattr(self, name)) for name in (*SAMPLING, *OWN)}
        per_call = left.pop("extra_body", {})
        others = {name: value for name, value in left.items() if value != []}  # an empty list asks for nothing
        return known, {**self.extra_body, **per_call, **others}

    def _answer(self, call: GenerateRequest) -> Callable[[], AsyncGenerator[Delta]]:
        """What yields the answer to `call` on another loop."""
        return partial(
            counted,
            call,
            partial(self._runtime, call.model),
            timeout=self.timeout,
            max_retries=self.max_retries,
        )

    def _runtime(self, model: str) -> Runtime:
        return self.runtime or runtime_for(model, self.base_url, self.api_key)


def _result(chunks: list[tuple[int, AIMessageChunk]]) -> ChatResult:
    """A result with one generation per choice."""
    choices: dict[int, list[AIMessageChunk]] = {}
    for index, chunk in chunks:
        choices.setdefault(index, []).append(chunk)
    messages = [to_message(parts) for _, parts in sorted(choices.items())]
    return ChatResult(
        generations=[
            ChatGeneration(message=message, generation_info=dict(message.response_metadata)) for message in messages
        ]
    )


def _with_one_choice(call: GenerateRequest) -> GenerateRequest:
    if call.sampling.n > 1:
        raise InvalidRequestError("a stream has one answer: leave n at 1, or use invoke or generate", param="n")
    return call


async def _token_ids(runtime: Runtime, model: str, text: str) -> list[int]:
    """Token ids of `text` as a part of a prompt. Raises `ConfigurationError` for a server without a tokenizer."""
    tokenizer = await _tokenization(runtime, model)
    try:
        return await tokenizer.tokenize(text)
    except UpstreamStatusError as error:
        if error.status not in _NO_ROUTE:
            raise
        raise ConfigurationError(
            f"{error.message}: tokens are counted by the server's /tokenize, as vLLM and agentspec have it; for a"
            " server without it set custom_get_token_ids to a function from a text to its token ids"
        ) from error


async def _tokenization(runtime: Runtime, model: str) -> Tokenization:
    """The tokenizer of `model`; of a strategy, its base model's; of a pool, that of one of its servers."""
    await runtime.start_for(model)
    route = runtime.base_of(model)
    backend, known = route.backend, route.upstream_model
    if isinstance(backend, PoolBackend):
        backend, named = await backend.any_server()
        known = named or known
    if isinstance(backend, OpenAIBackend):
        return backend.tokenizer_of(known)
    if not isinstance(backend, Tokenization):
        raise ConfigurationError(f"the model {model!r} shows no tokenizer: set custom_get_token_ids")
    return backend

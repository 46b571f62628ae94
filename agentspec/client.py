"""One call of a model, in this process or at an endpoint: `generate` and `chat`, and what `ChatAgentSpec` calls by."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload
from urllib.parse import urlsplit

import anyio
from pydantic import HttpUrl, SecretStr

from agentspec.backends.pool.pool import retry_after
from agentspec.backends.settings import OpenAISettings
from agentspec.background import iterate_async, iterate_sync, remote_runtime, shared_runtime
from agentspec.errors import (
    ConfigurationError,
    InvalidRequestError,
    NoServerError,
    OverloadedError,
    RequestTimeoutError,
    UpstreamError,
    UpstreamStatusError,
    UpstreamTimeoutError,
)
from agentspec.protocol.forms import parse_form
from agentspec.protocol.messages import parse_message, parse_prediction
from agentspec.protocol.policy import StepPolicy
from agentspec.protocol.requests import SamplingFields
from agentspec.protocol.validation import Closed, Count
from agentspec.runtime import Runtime
from agentspec.step.report import observe
from agentspec.step.scope import current, current_labels, current_policy, require_text
from agentspec.telemetry import gen_ai, tracing
from agentspec.telemetry.safe_errors import error_name
from agentspec.types import Delta, GenerateRequest, Labels, SamplingParams, Speculation, StructuredOutputs, Usage

if TYPE_CHECKING:
    from agentspec.telemetry.otel import Span

Chat = str | Sequence[Mapping[str, Any]]
DEFAULT_MODEL = "smollm2-135m"
SAMPLING = tuple(field.name for field in fields(SamplingParams))
OWN = ("model", "prediction", "speculation", "session", "store")
"""Options of a call besides sampling, None where they are left open."""
_RETRIED = (429, 502, 503, 504)
_RETRIES = 2
_NO_TEXT = {"n": "one answer", "tools": "text alone"}  # what these options would need more than


@overload
def generate(prompt: str, *, stream: Literal[True], **options: Any) -> Iterator[str]: ...
@overload
def generate(prompt: str, *, stream: Literal[False] = False, **options: Any) -> str: ...
def generate(prompt: str, *, stream: bool = False, **options: Any) -> str | Iterator[str]:
    """Continue a text with a model: `generate("1, 2, 3,", max_tokens=8)`. With `stream` it yields pieces of text.

    `model` is a built-in name, a folder, a GGUF file or a model-hub id, by default smollm2-135m, or any model of the
    endpoint `base_url` (with `api_key` or `$AGENTSPEC_API_KEY`). Further options are the sampling fields, `session`,
    `store`, `speculation` and `prediction`; an unknown one raises an error. The call is counted in `report()`.
    """
    return _answer(stream, options, text=prompt)


@overload
def chat(messages: Chat, *, stream: Literal[True], **options: Any) -> Iterator[str]: ...
@overload
def chat(messages: Chat, *, stream: Literal[False] = False, **options: Any) -> str: ...
def chat(messages: Chat, *, stream: bool = False, **options: Any) -> str | Iterator[str]:
    """Answer a chat: `messages` are OpenAI's, or one text of the user. Options are as in `generate`."""
    return _answer(stream, options, messages=_messages(messages))


@overload
async def agenerate(prompt: str, *, stream: Literal[True], **options: Any) -> AsyncIterator[str]: ...
@overload
async def agenerate(prompt: str, *, stream: Literal[False] = False, **options: Any) -> str: ...
async def agenerate(prompt: str, *, stream: bool = False, **options: Any) -> str | AsyncIterator[str]:
    """`generate` in an event loop: `async for piece in await agenerate("...", stream=True)`."""
    return await _aanswer(stream, options, text=prompt)


@overload
async def achat(messages: Chat, *, stream: Literal[True], **options: Any) -> AsyncIterator[str]: ...
@overload
async def achat(messages: Chat, *, stream: Literal[False] = False, **options: Any) -> str: ...
async def achat(messages: Chat, *, stream: bool = False, **options: Any) -> str | AsyncIterator[str]:
    """`chat` in an event loop."""
    return await _aanswer(stream, options, messages=_messages(messages))


def _answer(stream: bool, options: dict[str, Any], **content: Any) -> str | Iterator[str]:
    texts = _texts(_deltas(options, content))
    return texts if stream else "".join(texts)


def _texts(deltas: Callable[[], AsyncGenerator[Delta]]) -> Iterator[str]:
    with closing(iterate_sync(deltas)) as arriving:
        yield from (delta.text for delta in arriving if delta.text)


async def _aanswer(stream: bool, options: dict[str, Any], **content: Any) -> str | AsyncIterator[str]:
    texts = _atexts(_deltas(options, content))
    return texts if stream else "".join([text async for text in texts])


async def _atexts(deltas: Callable[[], AsyncGenerator[Delta]]) -> AsyncIterator[str]:
    async with aclosing(iterate_async(deltas)) as arriving:
        async for delta in arriving:
            if delta.text:
                yield delta.text


def _messages(messages: Chat) -> list[dict[str, Any]]:
    said = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    return [parse_message(message, f"messages[{number}]") for number, message in enumerate(said)]


def _deltas(options: dict[str, Any], content: dict[str, Any]) -> Callable[[], AsyncGenerator[Delta]]:
    """What yields the answer on the loop of the runtime. Reads labels and options now, in the caller's context."""
    for name, given in _NO_TEXT.items():
        if options.get(name) not in (None, 1, []):
            raise InvalidRequestError(f"{name}: generate and chat give {given}; use ChatAgentSpec", param=name)
    base_url = checked_url(options.pop("base_url", None))
    api_key = options.pop("api_key", None) or os.environ.get("AGENTSPEC_API_KEY")
    chosen = {name: options.pop(name, None) for name in (*SAMPLING, *OWN)}
    chosen["model"] = chosen["model"] or current_policy().model or DEFAULT_MODEL
    labels = replace(current_labels(), session=chosen["session"] or current_labels().session)
    call = call_of(chosen, labels, options, remote=base_url is not None, **content)
    key = SecretStr(api_key) if isinstance(api_key, str) else api_key
    return partial(counted, call, lambda: runtime_for(call.model, base_url, key))


def checked_url(url: str | None) -> str | None:
    """Raises `ConfigurationError` for a `base_url` that is no address."""
    if url is not None and (urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc):
        raise ConfigurationError(f"base_url must begin with http:// or https://, not {url!r}")
    return url


def runtime_for(model: str, base_url: str | None, api_key: SecretStr | None) -> Runtime:
    """The process's runtime for a model in this process, or for an endpoint."""
    if base_url is None:
        return shared_runtime(model)
    return remote_runtime(OpenAISettings(base_url=HttpUrl(base_url), api_key=api_key))


def call_of(
    chosen: Mapping[str, Any], labels: Labels, extra: dict[str, Any], *, remote: bool, **content: Any
) -> GenerateRequest:
    """The request of one call: `chosen` has `SAMPLING` and `OWN`; what it leaves open is the surrounding steps'."""
    require_text(labels)
    policy, own = current_policy(), StepPolicy(store=chosen["store"], speculation=chosen["speculation"])
    prediction = chosen["prediction"]
    if not isinstance(prediction, str | None):
        prediction = parse_prediction(prediction)
    if remote and prediction is not None:  # an endpoint reads it from the body
        extra = {**extra, "prediction": {"type": "content", "content": prediction}}
    return GenerateRequest(
        model=chosen["model"],
        sampling=_sampling(chosen),
        labels=labels,
        prediction=prediction,
        speculation=own.inside(policy).speculation is not False,
        store=False not in (own.store, policy.store),
        priority=policy.priority or 0,
        deadline_s=policy.deadline_s,
        early_tools=current.get().early_tools,
        extra=extra,
        **content,
    )


class _CallSampling(SamplingFields, Closed):
    """The sampling options of one call, with those that not all APIs have."""

    max_tokens: Count | None = None
    n: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None


def _sampling(chosen: Mapping[str, Any]) -> SamplingParams:
    given = {name: chosen[name] for name in _CallSampling.model_fields if chosen[name] is not None}
    lists = {name: list(value) for name, value in given.items() if isinstance(value, tuple)}
    found = _CallSampling.parse({**given, **lists}).given(*_CallSampling.model_fields)
    if found.get("top_logprobs"):
        found["logprobs"] = True
    form = chosen["structured_outputs"]
    if not isinstance(form, StructuredOutputs | None):
        form = parse_form({"structured_outputs": form})
    return SamplingParams(**found, structured_outputs=form)


async def counted(
    call: GenerateRequest,
    runtime_of: Callable[[], Runtime],
    *,
    timeout: float | None = None,
    max_retries: int = _RETRIES,
) -> AsyncGenerator[Delta]:
    """Yield the answer to `call`; count the call on its step when it finishes, fails or is aborted."""
    began = time.perf_counter()
    usage: Usage | None = None
    speculation: Speculation | None = None
    failed: str | None = None
    span, texts, reasons = _begin_span(call), list[str](), list[str]()
    captured = span is not None and call.store and tracing.captures_content()
    try:
        with anyio.fail_after(timeout):
            runtime = runtime_of()
            await runtime.start_for(call.model)
            began = time.perf_counter()  # the time to load a model does not count
            async with aclosing(_attempts(runtime, call, max_retries)) as deltas:
                async for delta in deltas if span is None else span.each(deltas):
                    texts += [delta.text] if captured else []
                    reasons += [delta.finish_reason] if delta.finish_reason else []
                    usage, speculation = delta.usage or usage, delta.speculation or speculation
                    yield delta
    except Exception as error:
        failed = error_name(error)
        if isinstance(error, TimeoutError):
            raise RequestTimeoutError(f"no whole answer within timeout={timeout!r} seconds") from None
        raise
    finally:
        observe(usage, speculation, time.perf_counter() - began, labels=call.labels, failed=failed is not None)
        if span is not None:
            span.set(gen_ai.of_answer(usage, speculation, reasons=reasons))
            if captured:
                choices = [("".join(texts), reasons[-1] if reasons else "unknown")]
                span.set({"gen_ai.output.messages": gen_ai.output_messages(choices)})
            span.end(failed)


def _begin_span(call: GenerateRequest) -> Span | None:
    """The span of a call, where something is traced."""
    chat = call.messages is not None
    if (span := tracing.start("chat" if chat else "text_completion", call.model, kind="client")) is None:
        return None
    given = {name: getattr(call.sampling, name) for name in SAMPLING if call.sampling.is_given(name)}
    span.set({**gen_ai.of_request(given, call.labels), "gen_ai.request.model": call.model})
    if call.store and tracing.captures_content():
        span.set({"gen_ai.input.messages": gen_ai.input_messages({"messages": call.messages, "prompt": call.text})})
    return span


async def _attempts(runtime: Runtime, call: GenerateRequest, max_retries: int) -> AsyncGenerator[Delta]:
    """Run `call`, with at most `max_retries` retries while no delta has arrived and the error is temporary."""
    for attempt in range(max_retries + 1):
        begun = False
        try:
            async with aclosing(runtime.generate(call)) as deltas:
                async for delta in deltas:
                    begun = True
                    yield delta
            return
        except (OverloadedError, UpstreamError) as error:
            if begun or attempt == max_retries or not _is_temporary(error):
                raise
            asked = error.retry_after if isinstance(error, OverloadedError | NoServerError) else None
            if isinstance(error, UpstreamStatusError):
                asked = retry_after(error.headers)
        await anyio.sleep(min(0.5 * 2**attempt if asked is None else asked, 30.0))


def _is_temporary(error: OverloadedError | UpstreamError) -> bool:
    if isinstance(error, UpstreamStatusError):
        return error.status in _RETRIED
    return not isinstance(error, UpstreamTimeoutError)  # a timeout has already used up the time limit

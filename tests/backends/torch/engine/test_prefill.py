"""After an answer with tool calls the backend reads what is known of the next prompt, unless that comes first."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.backends.settings import TorchSettings
from agentspec.backends.torch import TorchBackend
from agentspec.backends.torch.engine import prefill
from agentspec.backends.torch.engine.prefill import known_prompt
from agentspec.backends.torch.text.tokenizer import TokenizerAdapter
from agentspec.cache import SuffixCache
from agentspec.types import GenerateRequest, SamplingParams
from tests.backends.torch.conftest import Lab, byte_tokenizer, tiny

pytestmark = pytest.mark.anyio

FRAMED = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}"
    "{% if m.role == 'tool' %}<result>{{ m.content }}</result>{% else %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.arguments.a }}{% endfor %};{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
results = st.text("0x<}{ résult\n", max_size=12)


def calling(*ids: str) -> dict[str, Any]:
    calls = [{"id": id, "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}} for id in ids]
    return {"role": "assistant", "content": "let me see", "tool_calls": calls}


def result_of(id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": content}


@given(st.lists(results, min_size=1, max_size=3), st.integers(0, 2))
def test_the_known_prompt_begins_the_next_for_any_tool_results(texts: list[str], done: int) -> None:
    tokenizer = TokenizerAdapter(byte_tokenizer(FRAMED))
    ids = [f"call-{n}" for n in range(len(texts))]
    asked = [{"role": "user", "content": "hi"}, calling(*ids)]
    answers = [result_of(id, text) for id, text in zip(ids, texts, strict=True)]
    open_at = min(done, len(texts) - 1)
    known = known_prompt(tokenizer, GenerateRequest("m", messages=[*asked, *answers[:open_at]], tools=(FUNCTION,)))
    whole = tokenizer.prompt(GenerateRequest("m", messages=[*asked, *answers], tools=(FUNCTION,)))
    assert whole[: len(known)] == known
    assert tokenizer.decode(known).endswith("<result>")


SCHEMA = {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"], "additionalProperties": False}
TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments.a }}</tool_call>{% endfor %};"
    "{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}
MESSAGES = ({"role": "system", "content": "Be kind to all of them. " * 4}, {"role": "user", "content": "hello"})
SHORT = SamplingParams(temperature=0, max_tokens=12)
CALLING = GenerateRequest(
    "tiny",
    messages=MESSAGES,
    tools=(TOOL,),
    tool_choice="required",
    parallel_tool_calls=False,
    sampling=SamplingParams(temperature=0, max_tokens=100),
)


@pytest.fixture
async def backend_of() -> AsyncIterator[Any]:
    lab = Lab(tiny("llama"), byte_tokenizer(TEMPLATE))
    async with AsyncExitStack() as stack:

        def make(cache: SuffixCache | None = None, keeps_prefixes: bool = True) -> TorchBackend:
            backend = TorchBackend(lab.loaded, TorchSettings(), cache, keeps_prefixes=keeps_prefixes)
            stack.push_async_callback(backend.aclose)
            return backend

        yield make


async def turn(backend: TorchBackend, request: GenerateRequest) -> dict[str, Any]:
    """The assistant's message, which calls a tool."""
    deltas = [delta async for delta in backend.generate(request)]
    calls = [call for delta in deltas for call in delta.extra.get("tool_calls", ())]
    arguments = "".join(call["function"].get("arguments") or "" for call in calls)
    call = {"id": calls[0]["id"], "type": "function", "function": {"name": "f", "arguments": arguments}}
    assert json.loads(arguments) == {"a": "b"} and deltas[-1].finish_reason == "tool_calls"
    return {"role": "assistant", "content": "", "tool_calls": [call]}


async def follow(backend: TorchBackend, message: dict[str, Any], **fields: Any) -> tuple[list[int], Any]:
    """The next turn's tokens, and its usage."""
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "42"}
    request = replace(CALLING, messages=(*MESSAGES, message, result), tool_choice="none", sampling=SHORT, **fields)
    deltas = [delta async for delta in backend.generate(request)]
    return [token for delta in deltas for token in delta.token_ids], deltas[-1].usage


async def read(backend: TorchBackend) -> None:
    """Wait until the engine has read ahead what there was to read."""
    while not backend.stats().prefills["launched"]:
        await asyncio.sleep(0.01)
    while backend.stats().kv_rows:
        await asyncio.sleep(0.01)


async def test_the_next_turn_is_read_while_the_tool_runs(backend_of: Any) -> None:
    backend, plain = backend_of(), backend_of(keeps_prefixes=False)
    message = await turn(backend, CALLING)
    await read(backend)
    strangers = await follow(backend, message, tenant="stranger")
    tokens, usage = await follow(backend, message)
    assert usage.prompt_tokens - usage.cached_tokens == len("42;>") and backend.stats().prefills["used"] == 1
    without, own = await follow(plain, await turn(plain, CALLING))
    assert own.cached_tokens < usage.cached_tokens and strangers[1].cached_tokens == 0
    assert tokens == without == strangers[0]


@pytest.mark.parametrize("done", [False, True], ids=["while it is read", "once it was read"])
async def test_prompts_read_ahead_are_forgotten_with_their_tenant(backend_of: Any, done: bool) -> None:
    with SuffixCache.open() as cache:
        backend = backend_of(cache)
        message = await turn(backend, CALLING)
        while not backend.stats().prefills["launched"]:
            await asyncio.sleep(0)
        if done:
            await read(backend)
        cache.forget(tenant="default")
        await read(backend)
        assert (await follow(backend, message))[1].cached_tokens == 0
        await backend.aclose()


@pytest.mark.parametrize(
    ("settings", "fields"),
    [({"keeps_prefixes": False}, {}), ({}, {"store": False})],
    ids=["no slots", "store"],
)
async def test_nothing_is_read_ahead_when_it_is_switched_off(
    backend_of: Any, monkeypatch: pytest.MonkeyPatch, settings: Any, fields: Any
) -> None:
    monkeypatch.setattr(prefill, "WAITS", (0.0,) * 9)
    backend = backend_of(**settings)
    await follow(backend, await turn(backend, replace(CALLING, **fields)), tenant="stranger")
    await asyncio.sleep(0.05)
    assert backend.stats().prefills["launched"] == 0


def test_a_turn_comes_on_another_loop_after_its_own_was_closed() -> None:
    lab = Lab(tiny("llama"), byte_tokenizer(TEMPLATE))
    backend = TorchBackend(lab.loaded, TorchSettings())
    loop = asyncio.new_event_loop()
    message = loop.run_until_complete(turn(backend, CALLING))
    loop.close()

    async def later() -> list[int]:
        try:
            return (await follow(backend, message))[0]
        finally:
            await backend.aclose()

    assert asyncio.run(later())

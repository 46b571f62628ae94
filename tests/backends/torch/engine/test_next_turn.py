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
from agentspec.errors import InvalidRequestError
from agentspec.types import Delta, GenerateRequest, SamplingParams

pytestmark = pytest.mark.anyio

FRAMED = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}"
    "{% if m.role == 'tool' %}<result>{{ m.content }}</result>{% else %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.arguments.a }}{% endfor %};{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)
ASKED_BEFORE = (  # thoughts before the last question are left out
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}{{ m.role }}:"
    "{% if m.role == 'assistant' and loop.index0 < ns.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %};{% endfor %}{{ 'tools' if tools }}{% if add_generation_prompt %}>{% endif %}"
)
NO_TOOLS = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no') }}{% endif %}{% endfor %}{{ tools }}"
)
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
results = st.text("0x<}{ résult\n", max_size=12)


def calling(*ids: str) -> dict[str, Any]:
    calls = [{"id": id, "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}} for id in ids]
    return {"role": "assistant", "content": "let me see", "tool_calls": calls}


def result_of(id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": content}


@given(st.lists(results, min_size=1, max_size=3), st.integers(0, 2))
def test_it_begins_the_prompt_that_comes_whatever_the_tools_return(
    tokenizer_of: Any, texts: list[str], done: int
) -> None:
    tokenizer = TokenizerAdapter(tokenizer_of(FRAMED))
    ids = [f"call-{n}" for n in range(len(texts))]
    asked = [{"role": "user", "content": "hi"}, calling(*ids)]
    answers = [result_of(id, text) for id, text in zip(ids, texts, strict=True)]
    open_at = min(done, len(texts) - 1)
    known = known_prompt(tokenizer, GenerateRequest("m", messages=[*asked, *answers[:open_at]], tools=(FUNCTION,)))
    whole = tokenizer.prompt(GenerateRequest("m", messages=[*asked, *answers], tools=(FUNCTION,)))
    assert whole[: len(known)] == known
    assert tokenizer.decode(known).endswith("<result>")


def test_thoughts_that_the_template_leaves_out_are_not_part_of_it(tokenizer_of: Any) -> None:
    tokenizer = TokenizerAdapter(tokenizer_of(ASKED_BEFORE))
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<think>hm</think>yes"}]
    known = tokenizer.decode(known_prompt(tokenizer, GenerateRequest("m", messages=said)))
    assert known == "user:hi;assistant:yes;user:"


def test_a_template_that_refuses_results_is_told(tokenizer_of: Any) -> None:
    with pytest.raises(InvalidRequestError, match="no"):
        known_prompt(TokenizerAdapter(tokenizer_of(NO_TOOLS)), GenerateRequest("m", messages=[calling("1")]))


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
async def backend_of(lab_class: Any, tiny_model: Any, tokenizer_of: Any) -> AsyncIterator[Any]:
    lab = lab_class(tiny_model("llama"), tokenizer_of(TEMPLATE))
    async with AsyncExitStack() as stack:

        def make(keeps_prefixes: bool = True, **settings: Any) -> TorchBackend:
            backend = TorchBackend(lab.loaded, TorchSettings(**settings), keeps_prefixes=keeps_prefixes)
            stack.push_async_callback(backend.aclose)
            return backend

        yield make


async def turn(backend: TorchBackend, request: GenerateRequest) -> tuple[dict[str, Any], Any]:
    """The assistant's message, and the last delta."""
    deltas = [delta async for delta in backend.generate(request)]
    calls = [call for delta in deltas for call in delta.extra.get("tool_calls", ())]
    arguments = "".join(call["function"].get("arguments") or "" for call in calls)
    call = {"id": calls[0]["id"], "type": "function", "function": {"name": "f", "arguments": arguments}}
    assert json.loads(arguments) == {"a": "b"} and deltas[-1].finish_reason == "tool_calls"
    return {"role": "assistant", "content": "", "tool_calls": [call]}, deltas[-1]


def tokens_of(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def following(message: dict[str, Any]) -> GenerateRequest:
    id = message["tool_calls"][0]["id"]
    result = {"role": "tool", "tool_call_id": id, "content": "42"}
    return replace(CALLING, messages=(*MESSAGES, message, result), tool_choice="none", sampling=SHORT)


def waiting(backend: TorchBackend) -> Any:
    return backend._next_turns and backend._next_turns._waiting


async def settled(backend: TorchBackend) -> None:
    """Wait until nothing is left to read."""
    while waiting(backend) or backend._engine.reads_ahead().ready:
        await asyncio.sleep(0.01)


async def test_the_next_turn_is_read_while_the_tool_runs(backend_of: Any) -> None:
    backend = backend_of()
    message, _ = await turn(backend, CALLING)
    await settled(backend)
    assert backend.stats().prefills["launched"] == 1
    with_slots = [delta async for delta in backend.generate(following(message))]
    prompt = backend._tokenizer.prompt(following(message))
    assert len(prompt) - with_slots[-1].usage.cached_tokens == len("42;>")
    assert backend.stats().prefills["used"] == 1
    plain = backend_of()
    await turn(plain, replace(CALLING, prefill_next=False))
    without = [delta async for delta in plain.generate(following(message))]
    assert without[-1].usage.cached_tokens < with_slots[-1].usage.cached_tokens
    assert tokens_of(without) == tokens_of(with_slots)


@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        ({"keeps_prefixes": False}, {}),
        ({}, {"prefill_next": False}),
        ({}, {"store": False}),
    ],
    ids=["no slots", "request", "store"],
)
async def test_nothing_is_read_where_it_is_not_wanted(backend_of: Any, settings: Any, fields: Any) -> None:
    backend = backend_of(**settings)
    await turn(backend, replace(CALLING, **fields))
    await settled(backend)
    assert backend.stats().prefills["launched"] == 0


async def test_a_tool_that_is_faster_leaves_nothing_to_read(backend_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "WAITS", (60.0,))
    backend = backend_of()
    message, _ = await turn(backend, CALLING)
    assert waiting(backend)
    async for _ in backend.generate(following(message)):
        pass
    await settled(backend)
    assert backend.stats().prefills["launched"] == 0


async def test_what_waits_ends_with_the_backend(backend_of: Any) -> None:
    backend = backend_of()
    await turn(backend, CALLING)
    await backend.aclose()
    assert not waiting(backend)


def test_a_turn_comes_on_another_loop_after_its_own_was_closed(
    lab_class: Any, tiny_model: Any, tokenizer_of: Any
) -> None:
    lab = lab_class(tiny_model("llama"), tokenizer_of(TEMPLATE))
    backend = TorchBackend(lab.loaded, TorchSettings())
    loop = asyncio.new_event_loop()
    message, _ = loop.run_until_complete(turn(backend, CALLING))
    loop.close()
    assert waiting(backend)

    async def follow() -> list[Delta]:
        try:
            return [delta async for delta in backend.generate(following(message))]
        finally:
            await backend.aclose()

    assert tokens_of(asyncio.run(follow()))
    assert not waiting(backend)

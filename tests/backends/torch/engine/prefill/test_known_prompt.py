"""What is known of the next prompt is its beginning, whatever template renders it and whatever a tool returns."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.backends.torch.engine.prefill.known_prompt import after_calls, known_prompt
from agentspec.backends.torch.text.tokenizer import TokenizerAdapter
from agentspec.errors import InvalidRequestError
from agentspec.protocol.responses import Accumulator
from agentspec.types import Delta, GenerateRequest

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
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
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
    known = known_prompt(tokenizer, GenerateRequest("m", messages=[*asked, *answers[:open_at]], tools=(TOOL,)))
    whole = tokenizer.prompt(GenerateRequest("m", messages=[*asked, *answers], tools=(TOOL,)))
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


def test_what_follows_an_answer_is_its_text_and_calls_without_thoughts() -> None:
    request = GenerateRequest("m", messages=[{"role": "user", "content": "hi"}])
    answer = Accumulator()
    answer.add(Delta("so", extra={"reasoning": "hm", "tool_calls": [{"index": 0, **calling("1")["tool_calls"][0]}]}))
    answer.add(Delta(finish_reason="tool_calls"))
    following = after_calls(request, answer)
    assert following is not None and following.messages is not None
    assert following.messages[1:] == [{**calling("1"), "content": "so"}]
    assert after_calls(request, Accumulator()) is None
    assert after_calls(GenerateRequest("m", text="hi"), answer) is None

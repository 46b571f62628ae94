"""Prompts in, text out, held to what the engine computes; what a chat template refuses is the caller's mistake."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.backends.settings import TorchSettings
from agentspec.backends.torch.loader import load
from agentspec.backends.torch.text.model_text import ModelText, ids_of_end
from agentspec.backends.torch.text.tokenizer import LONG_TEXT, TokenizerAdapter
from agentspec.errors import ContextLengthError, InvalidRequestError
from agentspec.types import GenerateRequest
from tests.backends.torch.conftest import byte_tokenizer

USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def codec(lab: Any) -> TokenizerAdapter:
    return lab.tokenizer


class SlowTokenizer:
    """A tokenizer without a native half."""

    chat_template = None

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [1] * add_special_tokens + list(text.encode())

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return bytes(i for i in ids if i != 1 or not skip_special_tokens).decode()


def test_messages_go_through_the_template(codec: TokenizerAdapter) -> None:
    said = [257, *codec.encode("hi"), 258, *codec.encode("So far")]
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    talk = [{"role": "user", "content": parts}, {"role": "assistant", "content": "So far"}]
    assert codec.encode(codec.render([*talk, USER])) == [*said, 257, *codec.encode("hi"), 258]
    assert codec.encode(codec.render(talk, start=False, continue_final=True)) == said, "the last message stays open"


CALLS = [
    {},
    {"function": {"name": "f"}},
    {"function": {"name": "f", "arguments": ["{}"]}},
    {"function": {"name": "f", "arguments": "[" * 100_000}},
    {"function": {"name": 3, "arguments": "{}"}},
    "no call",
]


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "martian", "content": "hi"}],
        [{"content": "hi"}],
        *(
            [{"role": "user", "content": [part]}]
            for part in ({"type": "image_url"}, "hi", {"type": "text", "text": None})
        ),
        *([{"role": "assistant", "tool_calls": [call]}] for call in CALLS),
    ],
)
def test_refused_messages_name_the_field(codec: TokenizerAdapter, messages: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        codec.render(messages)
    assert caught.value.param == "messages"


def test_a_prompt_is_read_from_ids_text_or_messages(codec: TokenizerAdapter) -> None:
    assert codec.prompt(GenerateRequest("m", token_ids=(1, 2))) == [1, 2]
    assert codec.prompt(GenerateRequest("m", text="ab")) == codec.encode("ab", special=True)
    assert codec.prompt(GenerateRequest("m", messages=[USER])) == codec.encode(codec.render([USER]))
    slow = TokenizerAdapter(SlowTokenizer())
    assert slow.encode("a", special=True) == [1, 97] and slow.decode([1, 97]) == "a"
    with pytest.raises(InvalidRequestError, match="no chat template: use completions"):
        slow.render([USER])


def test_truncation_in_the_tokenizers_file_is_ignored(lab: Any) -> None:
    cutting = copy.deepcopy(lab.loaded.tokenizer)
    cutting.backend_tokenizer.enable_truncation(3)
    assert len(TokenizerAdapter(cutting).encode("abcdef")) == 6


@given(
    st.text(st.sampled_from("ab é\N{GRINNING FACE}<|>\n") | st.characters(codec="utf-8"), max_size=40), st.booleans()
)
def test_long_texts_are_encoded_like_short_ones(codec: TokenizerAdapter, text: str, special: bool) -> None:
    """Every token of this tokenizer is a byte or a marker, so that texts are encoded piece by piece."""
    ids, filler = codec.encode(text, special=special), "a" * LONG_TEXT
    assert codec.encode(text + filler + text, special=special) == [*ids, *codec.encode(filler), *ids]
    assert codec.fewest_tokens(text) <= len(ids)


@pytest.mark.parametrize("length", [0, LONG_TEXT])
def test_a_lone_surrogate_is_refused(codec: TokenizerAdapter, length: int) -> None:
    with pytest.raises(InvalidRequestError, match="surrogate"):
        codec.encode("a" * length + "\ud83d")


def test_a_text_that_cannot_fit_is_refused_unread(codec: TokenizerAdapter) -> None:
    text = "no room " * 1_000_000
    assert codec.fewest_tokens(text) > 1000
    for fields, param in (({"text": text}, "prompt"), ({"messages": [{**USER, "content": text}]}, "messages")):
        with pytest.raises(ContextLengthError, match=r"too long: at least \d+ tokens > 1000 maximum") as caught:
            codec.read(GenerateRequest("m", **fields), 1000)
        assert caught.value.param == param


TOOL = {"type": "function", "function": {"name": "f", "description": "does f", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "done"}]},
]
WITH_TOOLS = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}{{ m.role }}:"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments.a[0] }}{% endfor %};"
    "{% endfor %}"
    "{% if thinking is defined %}{{ thinking }}{% endif %}{% if add_generation_prompt %}>{% endif %}"
)


def rendered(tokenizer: Any, messages: Any = TALK, start: bool = True, **fields: Any) -> str:
    return TokenizerAdapter(tokenizer).render(messages, start=start, **fields)


def test_a_template_that_knows_tools_gets_them_and_arguments_as_objects() -> None:
    tokenizer = byte_tokenizer(WITH_TOOLS)
    said = rendered(tokenizer, tools=(TOOL,), template_arguments={"thinking": "no"})
    assert said == "[f]user:hi;assistant:<tool_call>1;tool:done;no>"
    assert rendered(tokenizer, start=False) == "user:hi;assistant:<tool_call>1;tool:done;"


def test_one_that_does_not_has_them_described(byte_tokens: Any) -> None:
    said = rendered(byte_tokens, tools=(TOOL,))
    system, user, calls, result, end = said.split("<|")[1:]
    assert json.dumps(TOOL["function"]) in system and "<tool_call>" in system
    assert user == "user|>hi" and calls.endswith('<tool_call>\n{"name": "f", "arguments": {"a": [1]}}\n</tool_call>')
    assert result == "user|><tool_response>\ndone\n</tool_response>" and end == "assistant|>"
    told = rendered(byte_tokens, [{"role": "system", "content": "be kind"}, *TALK], tools=(TOOL,))
    assert told.startswith("<|user|>be kind\n\n") and told.count("<tools>") == 1
    assert "<tools>" not in rendered(byte_tokens)


@pytest.mark.parametrize("arguments", ['{"a": ', "[]", "", "5"])
def test_a_call_that_a_model_broke_off_ends_no_conversation(byte_tokens: Any, arguments: str) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    said = rendered(byte_tokens, [{"role": "assistant", "tool_calls": [call]}])
    assert '{"name": "f", "arguments": {}}' in said


OPEN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
FIRST = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}"
FIRST += "<{{ m.role }}>{{ m.content }}{% endfor %}"
KNOWN = (
    "{% for m in messages %}{% if m.role == 'developer' %}{{ raise_exception('unknown') }}{% endif %}{% endfor %}"
    + FIRST
)
FRONT = "{% for m in messages if m.role == 'system' %}<system>{{ m.content }}{% endfor %}"
FRONT += "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
DROPS = OPEN.replace("<{{", "{% if m.role != 'system' or loop.first %}<{{").replace("{% endfor", "{% endif %}{% endfor")
TURNS = "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) or m.role == 'system' %}"
TURNS += "{{ raise_exception('alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
CHAT = [("system", "a"), ("user", "b"), ("assistant", "c")]


@pytest.mark.parametrize(
    ("template", "roles", "prompt"),
    [
        (OPEN, [*CHAT, ("system", "d"), ("user", "e")], "<system>a<user>b<assistant>c<system>d<user>e"),
        (FIRST, [*CHAT, ("system", "d"), ("user", "e")], "<system>a<user>b<assistant>c<user>d<user>e"),
        (FRONT, [*CHAT, ("system", "d"), ("user", "e")], "<system>a<user>b<assistant>c<user>d<user>e"),
        (DROPS, [*CHAT, ("system", "d"), ("user", "e")], "<system>a<user>b<assistant>c<user>d<user>e"),
        (TURNS, [*CHAT, ("system", "d"), ("user", "e")], "<user>a\n\nb<assistant>c<user>d\n\ne"),
        (TURNS, CHAT[:2], "<user>a\n\nb"),
        (OPEN, [("system", "a"), ("system", "d"), *CHAT[1:]], "<system>a<system>d<user>b<assistant>c"),
        (FIRST, [("system", "a"), ("system", "d"), *CHAT[1:]], "<system>a\n\nd<user>b<assistant>c"),
        (FIRST, [*CHAT[1:], ("system", "d")], "<user>b<assistant>c<user>d"),
        (KNOWN, [("developer", "a"), *CHAT[1:], ("developer", "d")], "<system>a<user>b<assistant>c<user>d"),
    ],
)  # fmt: skip
def test_system_messages_stay_where_they_are(template: str, roles: Any, prompt: str) -> None:
    messages = [{"role": role, "content": content} for role, content in roles]
    tokenizer = byte_tokenizer(template)
    assert rendered(tokenizer, messages) == prompt
    before = rendered(tokenizer, messages[:3])
    assert prompt.startswith(before) or template is TURNS  # so that it is read from the KV cache


THINKS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.NAME %}<think>\n{{ m.NAME }}\n</think>\n\n{% endif %}{{ m.content }}"
)
THINKS += "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ 'ARGS' }}{% endfor %}{% endfor %}"
THINKS += "{% if tools and false %}{% endif %}{% if add_generation_prompt %}<assistant>{% endif %}"
ARGUMENTS = ("{{ c.function.arguments }}", "{{ c.function.arguments|tojson }}", "{{ '' + c.function.arguments + '' }}")


@pytest.mark.parametrize("sent", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_a_turn_goes_on_from_the_thoughts_and_calls_before(name: str, sent: str, arguments: str) -> None:
    tokenizer = byte_tokenizer(THINKS.replace("NAME", name).replace("{{ 'ARGS' }}", arguments))
    asked = [{"role": "user", "content": "hi"}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": ["é"]}'}}
    said = {"role": "assistant", "content": None, sent: "Hm.", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "1", "content": "done"}
    answer = '<think>\nHm.\n</think>\n\nf{"a": ["é"]}'
    assert rendered(tokenizer, [*asked, said, result], tools=(TOOL,)).startswith(rendered(tokenizer, asked) + answer)


def test_thoughts_and_text_with_calls_are_joined_for_a_template_that_takes_one_of_them() -> None:
    strict = "{% for m in messages %}{% if m.thinking and m.content %}{{ raise_exception('both') }}{% endif %}"
    strict += "{{ m.thinking }}{{ m.content }};{% endfor %}{{ tools }}"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    said = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [call]}
    assert rendered(byte_tokenizer(strict), [said]).startswith("Hm.\n\nI look.;")


def test_chats_and_prompts_have_a_largest_size() -> None:
    said = [{"role": "user", "content": "x" * 1000}]
    assert len(rendered(byte_tokenizer("{{ messages[0].content * 10000 }}"), said)) == 10_000_000
    with pytest.raises(InvalidRequestError, match="the prompt is longer than 10,000,000 characters"):
        rendered(byte_tokenizer("{{ messages[0].content * 10000 }}x"), said)
    with pytest.raises(InvalidRequestError, match="messages holds more than 10,000 messages"):
        rendered(byte_tokenizer("{{ messages|length }}"), [{"role": "user", "content": ""}] * 10_001)


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello there"}]
ANSWER = {"role": "assistant", "content": "General Kenobi"}


@pytest.fixture(scope="module")
def text(default_model: Any) -> ModelText:
    return ModelText.load(str(default_model.folder))


@pytest.mark.model
def test_a_recorded_call_has_the_engines_tokens(text: ModelText) -> None:
    prompt, answer = text.encode(MESSAGES, ANSWER)
    assert prompt == text.tokenizer.encode(text.tokenizer.render(MESSAGES))
    assert answer[:-1] == text.tokenizer.encode("General Kenobi") and answer[-1] in text.end_ids
    assert text.tokenizer.spell(answer[-1]) == "<|im_end|>"
    assert text.encode(MESSAGES, ANSWER, finished=False)[1] == answer[:-1]
    assert text.encode([], ANSWER, prompt="Once upon") == (text.tokenizer.encode("Once upon", special=True), answer)


@pytest.mark.slow
@pytest.mark.model
def test_namespaces_are_the_engines(default_model: Any, text: ModelText) -> None:
    loaded = load(TorchSettings(model=str(default_model.folder)))
    assert loaded.namespace("t") == text.namespace("t")
    assert ids_of_end(loaded.target.module.generation_config, loaded.tokenizer) == text.end_ids


def test_the_ids_that_end_an_answer() -> None:
    tokenizer = SimpleNamespace(eos_token_id=2)
    assert ids_of_end(SimpleNamespace(eos_token_id=[1, 2]), tokenizer) == {1, 2}
    assert ids_of_end(SimpleNamespace(eos_token_id=None), tokenizer) == {2}
    assert ids_of_end(None, SimpleNamespace()) == frozenset()

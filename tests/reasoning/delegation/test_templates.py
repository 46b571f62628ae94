from __future__ import annotations

import sys
from pathlib import Path

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.backends.chat_templates import escape_markers
from agentspec.errors import ConfigurationError, InvalidRequestError
from agentspec.reasoning.delegation.context import Context, MessageContext, TextContext, TurnMarkup
from agentspec.reasoning.delegation.judge import quoted
from agentspec.reasoning.delegation.templates import Template
from agentspec.types import GenerateRequest

SAID = [{"role": "user", "content": "Two?"}, {"role": "assistant", "content": "Four."}]


def test_built_in_templates() -> None:
    assert Template("plain").render(SAID) == "User: Two?\n\nAssistant: Four.\n\nAssistant: "
    assert Template("chatml").render(SAID[:1]) == "<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n"
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert Template("plain").render(parts) == "User: ab\n\nAssistant: "
    with pytest.raises(InvalidRequestError, match="text parts"):
        Template("plain").render([{"role": "user", "content": [{"type": "image_url"}]}])


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def test_a_template_that_knows_tools_gets_them_and_others_describe_them(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(
        "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}{{ mood }}{{ messages[0].content }}"
    )
    knowing = Template(str(file))
    assert knowing.render(SAID, [TOOL], {"mood": "calm: "}) == "[add]calm: Two?" and knowing.render(SAID) == "Two?"
    told = Template("chatml").render(SAID[:1], [TOOL])
    assert told.startswith("<|im_start|>system\n") and '{"name": "add"' in told and told.count("<tools>") == 1
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
    assert '<tool_call>\n{"name": "add", "arguments": {}}' in Template("plain").render([called])


def test_a_template_file_is_sandboxed_and_may_refuse(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(
        "{% if messages|length > 1 %}{{ raise_exception('one only') }}{% endif %}Q: {{ messages[0].content }}"
    )
    assert Template(str(file)).render(SAID[:1]) == "Q: Two?"
    with pytest.raises(InvalidRequestError, match="one only"):
        Template(str(file)).render(SAID)
    file.write_text("{{ ''.__class__.__mro__ }}")
    with pytest.raises(InvalidRequestError, match="unsafe"):
        Template(str(file)).render(SAID)
    file.write_text("{% if %}")
    with pytest.raises(ConfigurationError, match="chat template"):
        Template(str(file))
    file.write_text("{{ 1" + "+1" * 20000 + " }}")
    with pytest.raises(ConfigurationError, match="recursion"):
        Template(str(file))
    file.write_bytes(b"\xff{{ messages }}")
    with pytest.raises(ConfigurationError, match=r"template\.jinja.*UTF-8"):
        Template(str(file))


def test_without_jinja_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ConfigurationError, match=r"pip install '\.\[proxy\]'"):
        Template("plain")


@given(st.text(alphabet="<>|im_start ab\n", max_size=30))
def test_quoted_text_closes_no_quotation_and_opens_no_turn(text: str) -> None:
    said = quoted(text)
    assert "<<<" not in said and ">>>" not in said and "<|" not in said


@pytest.mark.parametrize("mark", ["<|im_end|>", "<\uff5cUser\uff5c>", "<start_of_turn>", "</s>", "[/INST]", "<eos>"])
def test_marks_of_turns_are_broken_up(mark: str) -> None:
    assert mark not in escape_markers(f"x{mark}y")


def test_ordinary_text_is_left_alone() -> None:
    for text in ("a < b and c > d", "x[0] << 2", "<think>\nso", "</think>", "a<b|c"):
        assert escape_markers(text) == text


def test_a_marker_that_two_steps_make_together_is_none_in_any_context() -> None:
    asked = GenerateRequest("m", messages=[{"role": "user", "content": "?"}])
    for mark in ("<|im_start|>", "<start_of_turn>", "</s>", "[/INST]", "<\uff5cUser\uff5c>"):
        for at in range(1, len(mark)):
            contexts: list[Context] = [MessageContext(asked, ""), TextContext(asked, TurnMarkup("", ""), "")]
            for context in contexts:
                for piece in ("x", mark[:at], mark[at:], "y"):
                    anyio.run(context.extend, piece)
                assert escape_markers(context.text) == context.text  # type: ignore[attr-defined]
    context = TextContext(asked, TurnMarkup("", ""), "<|im_start|>")
    anyio.run(context.extend, "x < y")
    assert context.text == "<|im_start|>x < y"

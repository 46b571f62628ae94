"""Templates of models render character for character as transformers renders them."""

from __future__ import annotations

from typing import Any

import pytest

from agentspec.backends.model_store import ModelFiles
from agentspec.backends.templates.huggingface import rendered

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

TOOL = {"type": "function", "function": {"name": "f", "description": "ü <x>", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": [1, None, 2.5]}}}
TALKS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": "be  kind\n"}, {"role": "user", "content": " hi \n"}],
    [
        {"role": "user", "content": "ü"},
        {"role": "assistant", "content": "well", "reasoning_content": "hm", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "done", "name": None},
        {"role": "assistant", "content": "so  "},
    ],
]
# The constructs of the templates of Llama 3, Qwen 2.5 and 3, Mistral, Gemma and gpt-oss.
SOURCES = [
    "{{- bos_token }}\n{%- set ns = namespace(tools=tools is not none) %}\n{%- for m in messages %}\n"
    "    {%- if m.role == 'tool' or 'tool_calls' in m %}\n{{- '<|' + m.role + '|>' }}\n    {%- endif %}\n"
    "{{- m['content'] | trim + eos_token }}\n{%- endfor %}\n{%- if add_generation_prompt %}{{ '>' }}{% endif %}",
    "{%- if tools %}{{- '<tools>' }}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}{%- endif %}"
    "{%- for m in messages %}{%- if (m.role == 'user') or (loop.first and m.role == 'system') %}"
    "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}{%- elif m.role == 'assistant' %}"
    "{%- set content = m.content %}{%- if m.reasoning_content %}{{- '<think>' + m.reasoning_content.strip('\\n') }}"
    "{%- endif %}{{- content.split('</think>')[-1].lstrip('\\n') }}{%- for c in m.tool_calls or [] %}"
    "{{- c.function.arguments | tojson(indent=2) }}{%- endfor %}{%- endif %}{%- endfor %}",
    "{%- macro typed(s, d=0) -%}{%- if s is mapping -%}{%- for k, v in s|dictsort -%}{{ k }}:{{ typed(v, d + 1) }},"
    "{%- endfor -%}{%- elif s is iterable and s is not string -%}[{% for x in s %}{{ typed(x, d + 1) }}{% endfor %}]"
    "{%- else -%}{{ s }}{{ ' ' * d }}{%- endif -%}{%- endmacro -%}{{ typed(messages) }}{{ typed(tools or {}) }}",
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set s = messages[0]['content'] %}"
    "{% else %}{% set loop_messages = messages %}{% set s = false %}{% endif %}{% for m in loop_messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) and 0 %}{{ raise_exception('no') }}{% endif %}"
    "{% if loop.index0 == 0 and s != false %}{% set content = '<<SYS>>\\n' + s + '\\n<</SYS>>' + m['content'] %}"
    "{% else %}{% set content = m['content'] %}{% endif %}{% generation %}{{ content }}{% endgeneration %}{% endfor %}",
    "{% for m in messages %}{% if m.thinking is defined %}({{ m.thinking }}){% endif %}{{ m.content }}{% endfor %}"
    "{{ style|default('plain') }}{{ messages|length }}{{ tools }}{{ documents }}",
]


def tokenizer_of(template: str) -> Any:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "</s>": 1}, unk_token="<s>"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", chat_template=template
    )


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("said", TALKS)
@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_rendering_is_that_of_transformers(source: str, said: Any, tools: Any) -> None:
    tokenizer = tokenizer_of(source)
    _same(tokenizer, said, tools, {"style": "s", "bos_token": "<s>"})


def _same(tokenizer: Any, said: Any, tools: Any, arguments: dict[str, Any]) -> None:
    ways = [(True, False), (False, False)] + (
        [(False, True)] if said[-1]["role"] == "assistant" and "content" in tokenizer.chat_template else []
    )
    for start, continued in ways:
        theirs = tokenizer.apply_chat_template(
            said,
            tools=tools,
            tokenize=False,
            add_generation_prompt=start,
            continue_final_message=continued,
            **arguments,
        )
        given = {**tokenizer.special_tokens_map, **arguments}
        ours = rendered(tokenizer.chat_template, said, tools, given, start=start, continue_final=continued)
        assert ours == theirs


@pytest.mark.model
def test_the_default_models_template_renders_the_same(default_model: ModelFiles) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(default_model.folder)
    for said in TALKS[:2]:
        _same(tokenizer, said, None, {})


def test_a_message_that_the_template_does_not_show_cannot_be_continued() -> None:
    said = [{"role": "assistant", "content": "so"}]
    for source in ("{{ messages[0].role }}", "{{ messages[0].content[::-1] }}"):
        with pytest.raises(ValueError, match="last message"):
            rendered(source, said, None, {}, start=False, continue_final=True)

"""From a request to the rules and the reading of its answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentspec.backends.torch.grammars.grammar import GrammarCompiler
from agentspec.backends.torch.sampling.constraints import ThinkingLimit
from agentspec.backends.torch.text.structured_output import StructuredOutput, StructuredOutputBuilder
from agentspec.backends.torch.text.tokenizer import TokenizerAdapter
from agentspec.errors import InvalidRequestError
from agentspec.types import Delta, GenerateRequest, SamplingParams, StructuredOutputs
from tests.backends.torch.conftest import byte_tokenizer

END = 256
TOOLS = tuple(
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("one", "two")
)
THINKING = "{% for m in messages %}{{ m.content }}{% endfor %}{# <think></think> #}"


@pytest.fixture(scope="module")
def forms(byte_tokens: Any) -> StructuredOutputBuilder:
    return StructuredOutputBuilder(TokenizerAdapter(byte_tokens), 259, frozenset({END}))


@pytest.fixture(scope="module")
def thinking() -> StructuredOutputBuilder:
    return StructuredOutputBuilder(TokenizerAdapter(byte_tokenizer(THINKING)), 259, frozenset({END}))


def ask(form: StructuredOutputs | None = None, **fields: Any) -> GenerateRequest:
    sampling = fields.pop("sampling", SamplingParams(structured_outputs=form))
    return GenerateRequest("m", messages=[{"role": "user", "content": "x"}], sampling=sampling, **fields)


def allows(form: StructuredOutput, tokenizer: Any, text: str, *, marks: bool = True, end: int = END) -> bool:
    """Whether the form allows a whole answer; with `marks` in it as special tokens."""
    assert form.source is not None
    compiler = GrammarCompiler(tokenizer, len(tokenizer), [end])
    state = compiler.compile(form.source.text, param=form.source.param).start()
    parts = [text] if marks else text
    for token in [token for part in parts for token in tokenizer.encode(part, add_special_tokens=False)]:
        if not state.allows(token):
            return False
        state.advance(token)
    return state.allows(end)


def called(name: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>'


LITERALS = ('"', "\\", 'a"b\\n', "line\nline\r", "é😀", "<|end|>x")
A, B = {"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {"type": "string"}}}
BOTH = '{"a": 1, "b": "x"}'
CLOSED: list[dict[str, Any]] = [
    {"type": "object", **A},
    A,
    {"type": "object", **A, "anyOf": [{"required": ["a"]}, {"type": "object"}]},
    {"$ref": "#/$defs/A", "$defs": {"A": {"type": "object", **A}}},
]
OPEN: list[dict[str, Any]] = [  # an object's properties are listed in several places, or others are allowed
    {"type": "object", **A, "required": ["a", "b"]},
    {"type": "object", **A, "required": ["a"], "anyOf": [{**B, "required": ["b"]}, {"required": ["c"]}]},
    {"type": "object", "required": ["a"], "anyOf": [B, {"properties": {"c": {}}}]},
    {"$ref": "#/$defs/A", **B, "$defs": {"A": {"type": "object", **A}}},
    {"type": "object", **A, "anyOf": [{"$ref": "#/$defs/B"}], "$defs": {"B": B}},
    {"type": "object", **A, "additionalProperties": True},
    {"type": "object", **A, "patternProperties": {"b": {}}},
    {"type": "object", "allOf": [{"type": "object", **A}, {"type": "object", **B}]},
    {"type": "object"},
]


def inside(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"in": schema}, "$defs": schema.get("$defs", {})}


@pytest.mark.parametrize(
    ("fields", "right", "wrong"),
    [
        ({"tool_choice": "required"}, [called("one"), called("one") + "\n" + called("two")], ["x", ""]),
        (
            {"tool_choice": "required", "parallel_tool_calls": False},
            [called("two")],
            [called("one") + "\n" + called("two")],
        ),
        ({"tool_choice": "two"}, [called("two")], [called("one"), called("two") + "\n" + called("two")]),
        ({"form": StructuredOutputs(choice=("x", "y\n\""))}, [called("one"), "x", 'y\n"'], ["", "z"]),
        ({"form": StructuredOutputs(choice=LITERALS)}, LITERALS, ["line"]),
        ({"form": StructuredOutputs(choice=("x",)), "tool_choice": "none"}, ["x"], [called("one")]),
        ({"form": StructuredOutputs(choice=("x",)), "tool_choice": "one"}, [called("one")], ["x"]),
        ({"form": StructuredOutputs(regex="a/b+")}, ["a/bb"], ["a/"]),
        ({"form": StructuredOutputs(regex='"\\\\d|/')}, ['"\\d'], ['"1']),
        ({"form": StructuredOutputs(json_object=True)}, ['{"a": 1}'], ["[1]"]),
        ({"form": StructuredOutputs(json={"enum": ["a", 1]})}, ['"a"'], ["2"]),
        ({"form": StructuredOutputs(json=True)}, ["[1, null]"], ["[1"]),
        ({"form": StructuredOutputs(grammar='start: "a" b\nb: "b" | "c"')}, ["ac"], ["a"]),
        *(({"form": StructuredOutputs(json=schema)}, [], [BOTH]) for schema in CLOSED),
        *(({"form": StructuredOutputs(json=schema)}, [BOTH], ["[]"]) for schema in OPEN),
        *(({"form": StructuredOutputs(json=inside(schema))}, [f'{{"in": {BOTH}}}'], ["[]"]) for schema in OPEN),
    ],
)  # fmt: skip
def test_calls_and_forms(
    forms: StructuredOutputBuilder, byte_tokens: Any, fields: dict[str, Any], right: Any, wrong: Any
) -> None:
    form = forms.build(ask(tools=TOOLS, **fields), "x")
    allowed = [allows(form, byte_tokens, text, marks=False) for text in (*right, *wrong)]
    assert allowed == [True] * len(right) + [False] * len(wrong)


STRICT = tuple({**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS)
FREE = ["", "some <text> {}", called("one"), "so " + called("one") + "\nand " + called("two") + " ok"]
BOUND = ["<tool_call>", "a <tool_call>b", called("three"), called("one") + called("three")]


@pytest.mark.parametrize("marked", [False, True])
def test_calls_of_strict_tools_keep_to_them_in_any_text(marked: bool) -> None:
    tokenizer = byte_tokenizer("{{ tools }}<tool_call>")
    if marked:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>"]})
    forms = StructuredOutputBuilder(TokenizerAdapter(tokenizer), len(tokenizer), frozenset({END}))
    assert forms.build(ask(tools=TOOLS), "x").source is None
    form = forms.build(ask(tools=STRICT), "x")
    assert [allows(form, tokenizer, text) for text in FREE] == [True] * 4
    assert [allows(form, tokenizer, text) for text in BOUND] == [False] * 4
    one = forms.build(ask(tools=STRICT, parallel_tool_calls=False), "x")
    assert allows(one, tokenizer, FREE[2]) and (not marked or not allows(one, tokenizer, FREE[3]))


HMM = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
TO_ONE = "<|channel|>commentary to=functions.one <|constrain|>json<|message|>{}"
FINAL = "<|channel|>final<|message|>"
CHANNELS = ["<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>"]
X = StructuredOutputs(choice=("x",))
USER = 257  # ends answers here: harmony's <|end|> does not


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize(
    ("template", "fields", "right", "wrong"),
    [
        ("<|channel|>", {"tools": STRICT}, [TO_ONE, HMM + TO_ONE, HMM + HMM + FINAL + "yes", FINAL],
         ["yes", TO_ONE.replace("one", "three"), HMM + TO_ONE.replace("{}", '{"a": 1}'), HMM]),
        ("<|channel|>", {"form": X}, [HMM + FINAL + "x", FINAL + "x"], ["x", HMM + "x", FINAL + "y"]),
        ("<|channel|>", {"form": X, "tools": TOOLS}, [HMM + FINAL + "x", TO_ONE], [FINAL + "y"]),
        ("[func_name", {"tools": STRICT}, ["[one()]", " [one(), two()]", "Yes [one]", "[no](link)", "[1] so", ""],
         ["[three()]", "[one(a=1)]", "[one() so"]),
    ],
)  # fmt: skip
def test_answers_that_calls_begin_are_constrained(
    template: str, fields: dict[str, Any], right: list[str], wrong: list[str], marked: bool
) -> None:
    tokenizer = byte_tokenizer("{{ tools }}" + template)
    if marked:
        tokenizer.add_special_tokens({"additional_special_tokens": CHANNELS})
    builder = StructuredOutputBuilder(TokenizerAdapter(tokenizer), len(tokenizer), frozenset({USER}))
    form = builder.build(ask(**fields), "x")
    found = [allows(form, tokenizer, text, end=USER) for text in (*right, *wrong)]
    assert found == [True] * len(right) + [False] * len(wrong)


@pytest.mark.parametrize("marked", [False, True])
def test_gemmas_thoughts_are_split_off_and_come_before_a_form(marked: bool) -> None:
    tokenizer = byte_tokenizer("{{ tools }}<|tool_call><|channel>thought <channel|>")
    if marked:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|channel>", "<channel|>", "<|tool_call>"]})
    builder = StructuredOutputBuilder(TokenizerAdapter(tokenizer), len(tokenizer), frozenset({END}))
    form = builder.build(ask(X), "q")
    thought = "<|channel>thought\nhm <channel|>"
    assert [allows(form, tokenizer, text, marks=marked) for text in ("x", thought + "x", thought)] == [
        True,
        True,
        False,
    ]
    assert (
        len(form.shown) == 2 * marked and builder.build(ask(X), "q<|channel>thought\n<channel|>").source != form.source
    )
    answer = thought + "Yes. <|tool_call>call:one{}<tool_call|>"
    for pieces in ([answer], list(answer)):
        reader = builder.build(ask(tools=TOOLS), "q").parser_spec.parser()
        deltas = [reader.parse(Delta(text=piece)) for piece in pieces] + [reader.parse(Delta(finish_reason="stop"))]
        assert "".join(delta.extra.get("reasoning", "") for delta in deltas) == "hm"
        assert "".join(delta.text for delta in deltas) == "Yes. " and deltas[-1].finish_reason == "tool_calls"


def test_thoughts_come_before_the_form(thinking: StructuredOutputBuilder, byte_tokens: Any) -> None:
    request = ask(StructuredOutputs(choice=("x",)))
    maybe, begun, never = (thinking.build(request, prompt) for prompt in ("q", "q<think>", "q<think>\n</think>"))
    spoken = {"x": (1, 0, 1), "<think>x {</think>\n\nx": (1, 1, 0), "hm</think>x": (0, 1, 0), "<think>x": (0, 0, 0)}
    for text, want in spoken.items():
        assert tuple(allows(form, byte_tokens, text) for form in (maybe, begun, never)) == tuple(map(bool, want)), text


def test_thoughts_and_calls_are_read_off_the_answer(thinking: StructuredOutputBuilder) -> None:
    answer = "<think>hm</think>\n\nwell " + called("one")
    for split, text, thoughts in ((True, "well ", "hm"), (False, "<think>hm</think>\n\nwell ", None)):
        reader = thinking.build(ask(tools=TOOLS, split_reasoning=split), "q").parser_spec.parser()
        deltas = [reader.parse(Delta(text=character)) for character in answer] + [
            reader.parse(Delta(finish_reason="stop"))
        ]
        assert "".join(delta.text for delta in deltas) == text
        assert "".join(delta.extra.get("reasoning", "") for delta in deltas) == (thoughts or "")
        calls = [call for delta in deltas for call in delta.extra.get("tool_calls", [])]
        assert calls[0]["function"]["name"] == "one" and deltas[-1].finish_reason == "tool_calls"
        assert json.loads("".join(call["function"]["arguments"] for call in calls)) == {}


RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "reasoning_content": {"open": "((", "close": "))", "content": "text"},
        "tool_calls": {
            "open_pattern": r"@@(?P<name>\w+)", "close": "@@", "repeats": True, "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": "<end>", "content": "text"},
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "thoughts", "text", "calls"),
    [
        ('((hm))Yes. @@one{"a": 1}@@@@two{"a": "x"}@@', "hm", "Yes. ", [("one", {"a": 1}), ("two", {"a": "x"})]),
        ('Yes. @@one{"a": 1 @@ so', "", 'Yes. @@one{"a": 1 @@ so', []),
        ("plain @", "", "plain @", []),
        ("", "", "", []),
    ],
)
def test_a_format_of_its_own_is_read_by_the_checkpoints_template(
    answer: str, thoughts: str, text: str, calls: Any
) -> None:
    tokenizer = byte_tokenizer("{{ tools }} in a format of its own")
    tokenizer.response_template = RESPONSE_TEMPLATE
    builder = StructuredOutputBuilder(TokenizerAdapter(tokenizer), 259, frozenset({END}))
    for pieces in ([answer], list(answer), *([answer[:at], answer[at:]] for at in range(len(answer)))):
        parser = builder.build(ask(tools=TOOLS), "x<|assistant|>").parser_spec.parser()
        deltas = [parser.parse(Delta(text=piece)) for piece in pieces] + [parser.parse(Delta(finish_reason="stop"))]
        found = [call["function"] for delta in deltas for call in delta.extra.get("tool_calls", ())]
        assert [(call["name"], json.loads(call["arguments"])) for call in found] == calls, pieces
        assert "".join(delta.text for delta in deltas) == text
        assert "".join(delta.extra.get("reasoning", "") for delta in deltas) == thoughts
    with pytest.raises(InvalidRequestError, match="not known here"):  # what no grammar can enforce is refused
        builder.build(ask(tools=TOOLS, tool_choice="required"), "x")


def test_bad_words_count_with_and_without_a_blank(forms: StructuredOutputBuilder, byte_tokens: Any) -> None:
    words = forms.build(ask(sampling=SamplingParams(bad_words=("ab", "c"))), "x").bad_words
    assert words == (tuple(byte_tokens.encode("ab")), tuple(byte_tokens.encode("c")))
    with pytest.raises(InvalidRequestError) as caught:
        StructuredOutputBuilder(TokenizerAdapter(byte_tokens), 3, frozenset({END})).build(
            ask(sampling=SamplingParams(bad_words=("ab",))), "x"
        )
    assert caught.value.param == "bad_words"


@pytest.mark.parametrize(
    ("prompt", "budget", "limited"),
    [("q", 5, True), ("q<think>\n", 5, True), ("q<think></think>\n", 5, False), ("q", None, False)],
)
def test_a_budget_bounds_thoughts_to_come(prompt: str, budget: int | None, limited: bool) -> None:
    marked = byte_tokenizer(THINKING)
    marked.add_tokens(["<think>", "</think>"], special_tokens=True)
    begin, end = marked.convert_tokens_to_ids(["<think>", "</think>"])
    builder = StructuredOutputBuilder(TokenizerAdapter(marked), len(marked), frozenset({END}))
    found = {rules.thinking for rules in builder.build(ask(thinking_budget=budget), prompt).constraints(2, None)}
    assert found == ({ThinkingLimit(5, end, begin, begun=prompt != "q")} if limited else {None})
    without = StructuredOutputBuilder(TokenizerAdapter(byte_tokenizer(THINKING)), 259, frozenset({END}))
    assert without.build(ask(thinking_budget=budget), prompt).thinking is None, "it has no token for the end"

"""C1's part about forms of answers, and I6: no schema, expression, grammar or template ends or stalls the process."""

from __future__ import annotations

import asyncio
import json
import resource
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentspec.backends.settings import TorchSettings
from agentspec.proxy import create_app
from agentspec.runtime import Runtime
from agentspec.settings.load import ModelSettings, Settings
from agentspec.settings.server import ServerSettings

pytest.importorskip("torch")
pytestmark = pytest.mark.reliability
Json = Any


def nested(count: int, schema: Json = None) -> Json:
    schema = schema or {"type": "string"}
    for _ in range(count):
        schema = {"type": "array", "items": schema}
    return schema


def objects(count: int) -> Json:
    schema: Json = {"type": "string"}
    for _ in range(count):
        schema = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    return schema


def references(count: int) -> Json:
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**chain, f"d{count}": {"type": "string"}}}


def rules(count: int) -> str:
    return "start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1}' for i in range(count)) + f'\nr{count}: "z"'


def properties(count: int, *, required: bool = True) -> Json:
    names = [f"property_{i}" for i in range(count)]
    listed = {name: {"type": "string", "description": "what it is"} for name in names}
    return {"type": "object", "properties": listed, "required": names if required else []}


def schema(value: Json) -> Json:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": value}}}


def tools(parameters: Json, **fields: Json) -> Json:
    function = {"name": "f", "parameters": parameters}
    return {"tools": [{"type": "function", "function": function}], "tool_choice": "required", **fields}


REFUSED: dict[str, Json] = {
    "a chain of 30,000 rules": {"guided_grammar": rules(30_000)},
    "a chain of 40,000 terminals": {"guided_grammar": rules(40_000).replace("r", "R").replace("staRt", "start")},
    "nested arrays": schema(nested(400)),
    "1,500 nested arrays": {**schema("RAW"), "raw": '{"type":"array","items":' * 1500 + "{}" + "}" * 1500},
    "900 nested arrays": {**schema("RAW"), "raw": '{"type":"array","items":' * 900 + "{}" + "}" * 900},
    "1,500 levels of tool parameters": {
        **tools({"type": "object", "properties": {"x": "RAW"}}),
        "raw": '{"type":"object","properties":{"x":' * 750 + "{}" + "}}" * 750,
    },
    "nested objects": schema(objects(300)),
    "nested arrays in a string": {"guided_json": '{"items":' * 900 + "{}" + "}" * 900},
    "nested tool parameters": tools(objects(300)),
    "nested tool parameters, not required": tools(objects(300), tool_choice="auto"),
    "nested arrays in a grammar": {"guided_grammar": "start: %json " + '{"items":' * 3000 + "{}" + "}" * 3000},
    "brackets": {"guided_regex": "(" * 3000 + "a" + ")" * 3000},
    "repetitions that overlap": {"guided_regex": "(a|aa){5000}"},
    "repetitions of repetitions": {"guided_regex": "((a{999}){999}){999}"},
    "many optional parts": {"guided_regex": "a?b*" * 10_000},
    "29 expressions at once": {
        "guided_grammar": "start: T\nT: " + " & ".join(f"/(.*a.{{{count}}})/" for count in range(1, 30))
    },
    "alternatives that multiply": schema(
        {"allOf": [{"anyOf": [{"type": "object", "properties": {f"p{i}{j}": {}}} for j in range(4)]} for i in range(7)]}
    ),
    "a long constant": schema({"const": "abcdefghij" * 20000}),
    "blank lines": {"guided_grammar": "\n" * 100_000},
    "an open expression": {"guided_grammar": "start: /" + "\\/" * 100_000},
    "half a surrogate pair in a schema": schema({"enum": ["\ud800"]}),
    "half a surrogate pair as a key": schema({"properties": {"\ud800": {}}}),
    "half a surrogate pair in a tool": tools({"type": "object", "properties": {"\udfff": {}}}),
    "half a surrogate pair in a description": {
        "tools": [{"type": "function", "function": {"name": "f", "description": "\ud83d"}}]
    },
    "half a surrogate pair in an expression": {"guided_regex": "\ud800"},
    "half a surrogate pair in a call": {
        "messages": [
            {
                "role": "assistant",
                "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}],
            }
        ]
    },
    "a call's nested arguments": {
        "messages": [
            {
                "role": "assistant",
                "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"a":' * 5000 + "1" + "}" * 5000}}],
            }
        ]
    },
    "a number beyond floats": {**schema({"minimum": "RAW"}), "raw": "1e400"},
    "a penalty that vanishes": {**schema({"type": "object"}), "repetition_penalty": 1e-320},
    "a circle of references": schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
    "an infinite text": {"guided_grammar": 'start: "a" start'},
    "an infinite text in GBNF": {"guided_grammar": 'root ::= "a" root'},
    "more than most": schema({"type": "array", "minItems": 2, "maxItems": 1}),
    "no text": {"guided_regex": r"[^\s\S]"},
    "an unknown format": schema({"type": "string", "format": "nothing"}),
    "a look ahead": {"guided_regex": "(?=a)b"},
    "a reference to nothing": schema({"$ref": "#/$defs/none"}),
    "a reference elsewhere": schema({"$ref": "http://169.254.169.254/schema"}),
    "a multiple of nearly nothing": schema({"type": "number", "multipleOf": 1e-300}),
    "deep template arguments": {"chat_template_kwargs": {"x": nested(300)}},
    "a template": {"chat_template": "{{ 'x' * 1000000000 }}"},
    "a template as an argument": {"chat_template_kwargs": {"chat_template": "{{ 'x' * 1000000000 }}"}},
    "range as an argument": {"chat_template_kwargs": {"range": 5}},
}

TAKEN: dict[str, Json] = {
    "references": schema(references(3000)),
    "a chain of 3,000 rules": {"guided_grammar": rules(3000)},
    "a chain of 1,000 terminals": {"guided_grammar": rules(1000).replace("r", "R").replace("staRt", "start")},
    "infinite arguments": tools({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}),
    "an infinite array": schema({"type": "array", "items": {"$ref": "#"}, "minItems": 1}),
    "an infinite value": schema({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}),
    "5,000 properties": schema(properties(5000)),
    "1,000 optional properties": schema(properties(1000, required=False)),
    "30 levels": schema(objects(30)),
    "a list of 6 tools": {
        "tools": [{"type": "function", "function": {"name": f"f{i}", "parameters": objects(2)}} for i in range(6)],
        "tool_choice": "required",
    },
    "a tree": schema({"type": "object", "properties": {"x": {"type": "array", "items": {"$ref": "#"}}}}),
    "1,000 values": schema({"enum": [f"value {i}" for i in range(1000)]}),
    "4,096 choices": {"guided_choice": [f"choice {i}" for i in range(4096)]},
    "a long repetition": {"guided_regex": "[a-z ]{5000}"},
    "any length": schema({"type": "string", "maxLength": 2147483647}),
    "a completion": {"prompt": "x", "guided_choice": ["a", "b"]},
}

# What the parser of the body may refuse already, and what a compiler is given its four seconds for.
HEAVY = frozenset(
    [
        "5,000 properties",
        "1,000 optional properties",
        "many optional parts",
        "a long repetition",
        "29 expressions at once",
    ]
)


def some_of_each(counted: dict[str, int]) -> bool:
    """Whether some forms were accepted and some refused."""
    return all(any(count for kind, count in counted.items() if kind.endswith(end)) for end in ("accepted", "refused"))


def check(said: dict[str, Json]) -> None:
    """Each case is answered as it should be, and costs the event loop and the memory little."""
    refused, taken = REFUSED.keys() & said.keys(), TAKEN.keys() & said.keys()
    assert {name: said[name]["text"][:300] for name in refused if said[name]["status"] != 400} == {}
    for name in refused:
        error = json.loads(said[name]["text"])["error"]
        assert error["type"] == "invalid_request_error", name
        assert error["param"] or "body" in error["message"], name  # what no parser would read has no field
        assert "<state>" not in error["message"] and "backtrace" not in error["message"], name
        assert len(error["message"]) < 600, name
    assert {name: said[name]["text"][:300] for name in taken if said[name]["status"] != 200} == {}
    assert {name: one["loop"] for name, one in said.items() if one["loop"] > 1.0} == {}
    assert {name: one["grown"] for name, one in said.items() if one["grown"] > 100} == {}


async def outcomes(folder: str, cases: dict[str, Json]) -> dict[str, Json]:
    """What a gateway over a tiny model answers to one case after another."""
    settings = Settings(
        server=ServerSettings(request_timeout=120),
        backends={"local": TorchSettings(model=folder, device="cpu")},
        models={"tiny": ModelSettings(backend="local")},
    )
    async with Runtime(settings) as runtime:
        app = create_app(runtime, settings)
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=300) as client:
            return {name: await tried(client, name, fields) for name, fields in cases.items()}


async def tried(client: httpx.AsyncClient, name: str, fields: dict[str, Any]) -> dict[str, Any]:
    """What a case was answered, the processor time of the event loop meanwhile, and the growth of this process."""
    path = "/v1/completions" if "prompt" in fields else "/v1/chat/completions"
    body = {"model": "tiny", "max_tokens": 8, **fields}
    body.pop("raw", None)
    if path.endswith("chat/completions"):
        body = {"messages": [{"role": "user", "content": "x"}], **body}
    before, started, clock = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.thread_time(), time.monotonic()
    content = json.dumps(body).replace('"RAW"', fields.get("raw", ""))
    response = await client.post(path, content=content, headers={"content-type": "application/json"})
    loop = time.thread_time() - started
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return {
        "name": name,
        "status": response.status_code,
        "loop": loop,
        "grown": grown,
        "seconds": time.monotonic() - clock,
        "text": response.text[:3000],
    }


@pytest.mark.parametrize(
    ("grown", "heavy"),
    [(16, False), pytest.param(200, True, marks=pytest.mark.slow), pytest.param(5000, True, marks=pytest.mark.long)],
)
def test_c1_given_and_grown_forms_end_in_an_answer_or_a_400(tiny_model: Path, grown: int, heavy: bool) -> None:
    """In this process, which has loaded everything: a form that ended it would end the tests."""
    from tests.reliability.form_fuzz import grow_forms

    assert some_of_each(grow_forms(grown))
    cases = {name: fields for name, fields in sorted({**REFUSED, **TAKEN}.items()) if heavy or name not in HEAVY}
    answered = asyncio.run(outcomes(str(tiny_model), cases))
    assert answered.keys() == cases.keys()
    check(answered)


ESCAPES = {
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__.os.system('touch FILE') }}",
    "attributes of a namespace": "{{ namespace.__init__.__globals__.os.system('touch FILE') }}",
    "attributes by a filter": "{{ (namespace|attr('__init__')|attr('__globals__')).os.system('touch FILE') }}",
    "attributes by a format": "{{ '{0.__init__.__globals__.os}'.format(namespace).system('touch FILE') }}",
    "a method by a filter": "{{ (''|attr('__class__')).mro() }}",
    "an import": "{% import 'os' as os %}",
    "a file": "{% include 'FILE' %}",
    "a change of a message": "{% set _ = messages.append(1) %}",
    "deep brackets": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
}


@pytest.mark.parametrize("name", ESCAPES)
def test_i6_a_template_runs_no_code(name: str, tiny_model: Path, tmp_path: Path) -> None:
    from agentspec.backends.torch.text.model_text import read_tokenizer
    from agentspec.backends.torch.text.tokenizer import TokenizerAdapter
    from agentspec.errors import InvalidRequestError

    made = tmp_path / "made"
    tokenizer = read_tokenizer(tiny_model)
    tokenizer.chat_template = ESCAPES[name].replace("FILE", str(made))
    said = [{"role": "user", "content": "hi"}]
    with pytest.raises(InvalidRequestError, match="refuses these messages") as caught:
        TokenizerAdapter(tokenizer).render(said)
    assert caught.value.param == "messages" and len(caught.value.message) < 500
    assert not made.exists()

"""The gateway in front of the local engine: a tiny random model for the protocol, the default model for sense.

What a request may ask of its answer: forms, tool calls, several choices, tokens and scores.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.backends.settings import TorchSettings
from agentspec.settings.load import ModelSettings, Settings
from agentspec.settings.server import ServerSettings

torch = pytest.importorskip("torch")
MODEL = "tiny"
OFF = {"x-agentspec-speculation": "off"}


def serving(model: str, **torch_settings: Any) -> Settings:
    return Settings(
        server=ServerSettings(request_timeout=60, queue_timeout=0.05, max_concurrent=4),
        backends={"local": TorchSettings(model=model, device="cpu", **torch_settings)},
        models={MODEL: ModelSettings(backend="local")},
    )


@pytest.fixture(scope="module")
def running(shared_gateway: Any, tiny_model: Path) -> Any:
    return shared_gateway({}, serving(str(tiny_model), max_active=2))


@pytest.fixture(scope="module")
def client(running: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, content: str = "hello", **fields: Any) -> Any:
    defaults: dict[str, Any] = {"max_tokens": 200, "seed": 1}
    messages: list[Any] = [{"role": "user", "content": content}]
    return client.chat.completions.create(model=MODEL, messages=messages, **{**defaults, **fields})


def test_prediction_is_drafted_from(client: openai.OpenAI) -> None:
    content = ask(client, "predict me", max_tokens=24, temperature=0).choices[0].message.content
    predicted = {"type": "content", "content": content}
    answer = ask(client, "predict me", max_tokens=24, temperature=0, prediction=predicted)
    details = answer.usage.completion_tokens_details
    assert answer.choices[0].message.content == content
    assert details.accepted_prediction_tokens > 0 and details.rejected_prediction_tokens is not None


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=4),
    st.lists(st.integers(-2, 300) | st.text(max_size=3), max_size=3),
    st.dictionaries(st.integers(0, 300).map(str), st.floats(-100, 100), max_size=2),
)
NAMES = st.sampled_from(
    [
        "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
        "logit_bias", "seed", "stop", "stop_token_ids", "logprobs", "top_logprobs", "prompt", "stream",
    ]
)  # fmt: skip


@given(st.dictionaries(NAMES, VALUES, max_size=4), st.sampled_from(["ab", "é", [104], [0, 255]]))
def test_no_sampling_option_breaks_the_engine(client: openai.OpenAI, fields: dict[str, Any], prompt: Any) -> None:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 3, **fields}
    url = str(client.base_url).removesuffix("/") + "/completions"
    response = httpx.post(url, content=json.dumps(body), headers={"content-type": "application/json"}, timeout=300)
    assert response.status_code in (200, 400), response.text
    assert response.status_code == 400 or '"error"' not in response.text


PLACE = {"type": "string", "enum": ["Rome", "Oslo"]}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather somewhere.",
            "parameters": {
                "type": "object",
                "properties": {"place": PLACE, "hourly": {"type": "boolean"}},
                "required": ["place", "hourly"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "The time."}},
]


@pytest.mark.parametrize(
    ("extra", "answers"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, ("yes", "no")),
        ({"guided_choice": ["yes", "no"]}, ("yes", "no")),
        ({"guided_regex": "(ab){2}"}, ("abab",)),
        ({"structured_outputs": {"regex": "a/b|[0-9]{2}c"}}, ("a/b", *(f"{n:02}c" for n in range(100)))),
        ({"guided_grammar": 'start: "x" | "(" start ")"'}, tuple("(" * n + "x" + ")" * n for n in range(60))),
        ({"structured_outputs": {"grammar": 'start: "1" | "2"'}}, ("1", "2")),
        ({"guided_json": {"enum": [1, 22]}}, ("1", "22")),
    ],
)
def test_other_forms_on_both_routes(client: openai.OpenAI, extra: dict[str, Any], answers: tuple[str, ...]) -> None:
    chat = ask(client, extra_body=extra)
    assert chat.choices[0].message.content in answers
    plain = client.completions.create(model=MODEL, prompt="x", max_tokens=200, seed=3, extra_body=extra)
    assert plain.choices[0].text in answers


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"guided_regex": "a\\"}, "guided_regex"),
        ({"guided_grammar": "start: nothing"}, "guided_grammar"),
        ({"guided_json": {"type": "nothing"}}, "guided_json"),
        ({"structured_outputs": {"json": {"$ref": "http://elsewhere/x"}}}, "structured_outputs.json"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}},
         "response_format.json_schema.schema"),
        ({"tools": [TOOLS[0], {"type": "function", "function": {"name": "g", "parameters": {"type": "nothing"}}}],
          "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tools[1].function.parameters"),
    ],
)  # fmt: skip
def test_a_wrong_form_is_refused_by_the_clients_own_field(
    client: openai.OpenAI, extra: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, extra_body=extra)
    assert caught.value.param == param


def streamed(chunks: Any) -> tuple[str, list[list[str]], list[Any]]:
    """Text, calls as [id, name, arguments], and the reasons of every end."""
    text, calls, ends = "", [], []
    for chunk in chunks:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            for piece in choice.delta.tool_calls or []:
                if piece.id:
                    assert piece.index == len(calls) and piece.type == "function"
                    calls.append([piece.id, piece.function.name, ""])
                calls[piece.index][2] += piece.function.arguments or ""
            ends += [choice.finish_reason] if choice.finish_reason else []
    return text, calls, ends


@pytest.mark.parametrize(
    ("choice", "names", "end"),
    [
        ("required", {"weather", "now"}, "tool_calls"),
        pytest.param(
            *({"type": "function", "function": {"name": "weather"}}, {"weather"}, "stop"), marks=pytest.mark.slow
        ),
        ({"type": "function", "function": {"name": "now"}}, {"now"}, "stop"),
    ],
)
def test_tool_calls_streamed_and_whole(client: openai.OpenAI, choice: Any, names: set[str], end: str) -> None:
    fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    text, calls, ends = streamed(ask(client, stream=True, **fields))
    whole = ask(client, **fields).choices[0]
    off = ask(client, extra_headers=OFF, **fields).choices[0]
    [[_, name, arguments]] = calls
    for message in (whole.message, off.message):
        assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [(name, arguments)]
        assert message.content is None
    assert text == "" and ends == [whole.finish_reason] == [end] and name in names
    given = json.loads(arguments)
    assert given == {} if name == "now" else set(given) == {"place", "hourly"} and given["place"] in PLACE["enum"]


def test_token_ids_go_in_and_out(running: Any, client: openai.OpenAI) -> None:
    engine = running.runtime.backends()["local"]
    asked = {"return_token_ids": True}
    whole = ask(client, max_tokens=8, extra_body=asked).to_dict()
    assert whole["prompt_token_ids"] == engine.encode_chat([{"role": "user", "content": "hello"}])
    ids = whole["choices"][0]["token_ids"]
    assert len(ids) == whole["usage"]["completion_tokens"]
    chunks = [chunk.to_dict() for chunk in ask(client, max_tokens=8, extra_body=asked, stream=True)]
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == ids
    plain = client.completions.create(
        model=MODEL, prompt=whole["prompt_token_ids"], max_tokens=8, seed=1, extra_body=asked
    ).to_dict()
    assert plain["choices"][0]["token_ids"] == ids
    assert plain["choices"][0]["prompt_token_ids"] == whole["prompt_token_ids"]


def test_each_of_several_prompts_is_answered_as_alone(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "temperature": 0.0}
    together = client.completions.create(prompt=["one", "two", "three"], **asked)
    alone = [client.completions.create(prompt=prompt, **asked).choices[0].text for prompt in ("one", "two", "three")]
    assert [choice.text for choice in together.choices] == alone
    both = client.completions.create(prompt=["one", "two"], n=2, **asked)
    assert [choice.text for choice in both.choices] == [alone[0], alone[0], alone[1], alone[1]]


def respond(client: openai.OpenAI, **fields: Any) -> Any:
    given: dict[str, Any] = {"input": "hello", "max_output_tokens": 24, "extra_body": {"seed": 1}, **fields}
    return client.responses.create(model=MODEL, **given)


def test_a_continued_conversation_has_its_prompt_cached(client: openai.OpenAI) -> None:
    first = respond(client, temperature=0)
    second = respond(client, input="and?", previous_response_id=first.id, temperature=0)
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.usage.input_tokens_details.cached_tokens > 0


def test_tools_that_items_bring(client: openai.OpenAI) -> None:
    """As Codex sends its patch tool."""
    form = {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}
    space = {"type": "namespace", "name": "functions", "description": "All.",
             "tools": [{"type": "custom", "name": "apply_patch", "format": form}]}  # fmt: skip
    added = {"type": "additional_tools", "role": "developer", "tools": [space]}
    items: Any = [added, {"role": "user", "content": "go"}]
    [call] = respond(
        client, input=items, tool_choice="required", max_output_tokens=300, parallel_tool_calls=False
    ).output
    assert (call.type, call.namespace, call.name) == ("custom_tool_call", "functions", "apply_patch")


BAD = {"type": "nothing"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": BAD}}}, "text.format.schema"),
        ({"tools": [{"type": "function", "name": "f", "parameters": BAD}], "tool_choice": "required"},
         "tools[0].parameters"),
    ],
)  # fmt: skip
def test_a_wrong_form_of_a_response_is_refused_by_its_own_field(client: openai.OpenAI, fields: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        respond(client, **fields)
    assert refused.value.param == param


@pytest.mark.slow
@pytest.mark.model
def test_the_default_model(shared_gateway: Any, default_model: Any) -> None:
    running = shared_gateway({}, serving("smollm2-135m"))
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        prompt = "one two three four five six seven eight " * 3
        answer = client.completions.create(model=MODEL, prompt=prompt + "one", max_tokens=24, temperature=0)
        assert answer.choices[0].text.startswith(" two three four five six seven eight one two")
        speculation: Any = answer.to_dict()["speculation"]
        assert speculation["accepted"] > 8 and speculation["steps"] < 16
        chat = ask(client, "What is the capital of France?", max_tokens=12, temperature=0)
        assert "Paris" in chat.choices[0].message.content


def test_answers_have_vllms_metrics_of_speculation_where_the_settings_ask_for_them(
    gateway: Any, tiny_model: Path
) -> None:
    running = gateway({}, serving(str(tiny_model), per_request_spec_decode_metrics="detailed"))
    body = {"model": MODEL, "messages": [{"role": "user", "content": "again"}], "max_tokens": 24, "temperature": 0}

    def answer(**fields: Any) -> Any:
        return httpx.post(f"{running.url}/v1/chat/completions", json=body | fields, timeout=60)

    answer()
    told = answer().json()
    found = told["metrics"]["speculative_decoding"]
    accepted, drafted = found.pop("per_step_accepted"), found.pop("per_step_drafted")
    assert (sum(accepted), sum(drafted)) == (told["speculation"]["accepted"], told["speculation"]["drafted"])
    assert 0 < len(accepted) == len(drafted) <= told["speculation"]["steps"]
    assert found == {
        "mean_acceptance_length": 1 + sum(accepted) / len(accepted),
        "draft_acceptance_rate": sum(accepted) / sum(drafted),
        "acceptance_histogram": [accepted.count(length) for length in range(found["num_spec_tokens"] + 1)],
        "num_spec_steps": len(accepted),
        "num_accepted_draft_tokens": sum(accepted),
        "num_draft_tokens": sum(drafted),
        "num_spec_tokens": 48,
    }
    assert set(told["speculation"]) == {"drafted", "accepted", "steps", "estimated_seconds_saved"}
    streamed = answer(stream=True, stream_options={"include_usage": True}).text
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert [bool(event["choices"]) for event in events if "metrics" in event] == [False]
    assert "metrics" not in answer(n=2).json() and "metrics" not in answer(stream=True).text

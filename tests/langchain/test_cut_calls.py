"""Tool calls cut off at every character, in each dialect: the whole call arrives, or none that could run."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest
from langchain.agents import create_agent
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from pydantic import BaseModel

from agentspec.backends.torch.text.structured_output import OutputParserSpec
from agentspec.backends.torch.text.tool_parser import HERMES, LLAMA, MISTRAL, MISTRAL_IDS, MISTRAL_NAMED, ToolFormat
from agentspec.langchain import ChatAgentSpec
from agentspec.protocol.requests import with_extra
from agentspec.runtime import Runtime
from agentspec.testing import FakeBackend
from agentspec.types import Delta, FinishReason, GenerateRequest, Usage

CALLS = [("erase", {"at": "é/b", "n": 12}), ("erase", {})]
ONE, TWO = (json.dumps(arguments, ensure_ascii=False) for _, arguments in CALLS)
PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}, "n": {"type": "integer"}}}
WRITTEN: dict[str, tuple[ToolFormat, str]] = {
    "hermes": (
        HERMES,
        f'<tool_call>\n{{"name": "erase", "arguments": {ONE}}}\n</tool_call>\n'
        f'<tool_call>{{"arguments": {TWO}, "name": "erase"}}</tool_call>',
    ),
    "quoted": (
        HERMES,
        f'<tool_call>{{"name": "erase", "arguments": {json.dumps(ONE)}}}</tool_call>'
        '<tool_call>{"name": "erase"}</tool_call>',
    ),
    "llama": (LLAMA, f'{{"name": "erase", "parameters": {ONE}}}; {{"name": "erase", "parameters": {TWO}}}'),
    "mistral": (
        MISTRAL,
        f'[TOOL_CALLS] [{{"name": "erase", "arguments": {ONE}}}, {{"name": "erase", "arguments": {TWO}}}]',
    ),
    "named": (MISTRAL_NAMED, f"[TOOL_CALLS]erase[ARGS]{ONE}[TOOL_CALLS]erase[ARGS]{TWO}"),
    "ids": (
        MISTRAL_IDS,
        f"[TOOL_CALLS]erase[CALL_ID]a1B2c3D4e[ARGS]{ONE}[TOOL_CALLS]erase[CALL_ID]b1B2c3D4e[ARGS]{TWO}",
    ),
}


class Writer(FakeBackend):
    """Writes a text, a token for each character, and is cut off after `most`; "done" after a tool's result."""

    most = 0

    def __init__(self, format: ToolFormat, text: str) -> None:
        super().__init__()
        self.format, self.text = format, text

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        last = (request.messages or [{}])[-1]
        text = "done" if last["role"] == "tool" else self.text
        parser = OutputParserSpec.of(with_extra(request), self.format, "never").parser()
        said = text[: self.most]
        for character in said:
            yield parser.parse(Delta(text=character))
        ended: FinishReason = "length" if len(said) < len(text) else "stop"
        yield parser.parse(Delta(finish_reason=ended, usage=Usage(1, len(said))))


def written(dialect: str) -> tuple[ChatAgentSpec, Writer]:
    writer = Writer(*WRITTEN[dialect])
    return ChatAgentSpec(model="m", runtime=Runtime(backends={"m": writer})), writer


USUAL = ("hermes", "llama", "named")
DIALECTS = [name if name in USUAL else pytest.param(name, marks=pytest.mark.slow) for name in WRITTEN]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_cut_call_is_whole_or_invalid_in_langchain(dialect: str) -> None:
    model, writer = written(dialect)
    text, ran = writer.text, list[Any]()
    bound = model.bind_tools([{"name": "erase", "description": "", "parameters": PARAMETERS}])
    for at in range(1, len(text) + 1):
        writer.most = at
        whole, [first, *rest] = bound.invoke("go"), [*bound.stream("go")]
        for call in whole.invalid_tool_calls:
            assert call["args"] and (ONE.startswith(call["args"]) or TWO.startswith(call["args"])) and call["error"]
        for message in (whole, cast(AIMessage, first + rest)):
            ran = [(call["name"], call["args"]) for call in message.tool_calls]
            assert ran == CALLS[: len(ran)], (at, text[:at])
            assert message.response_metadata["finish_reason"] == ("tool_calls" if at == len(text) else "length")
    assert ran == CALLS


@pytest.mark.parametrize("streaming", [False, True])
def test_an_agent_runs_no_call_that_was_cut_off(streaming: bool) -> None:
    ran: list[tuple[str, Any]] = []

    @tool
    def erase(at: str = "/", n: int = 0) -> str:
        """Erase what is there."""
        ran.append(("erase", {"at": at, "n": n}))
        return "erased"

    model, writer = written("llama")
    agent: Any = create_agent(model, [erase])
    text, whole = writer.text, [CALLS[0], ("erase", {"at": "/", "n": 0})]
    for at in range(1, len(text) + 1):
        ran.clear()
        writer.most = at
        if streaming:
            assert list(agent.stream({"messages": "go"}, stream_mode="messages"))
        else:
            agent.invoke({"messages": "go"})
        assert all(call in whole for call in ran), text[:at]
    assert len(ran) == 2


class Place(BaseModel):
    at: str = "/"
    n: int = 0


@pytest.mark.parametrize("method", ["function_calling", "json_schema", "json_mode"])
def test_structured_output_says_that_it_was_cut_off(method: Any) -> None:
    call, whole = f'<tool_call>{{"name": "Place", "arguments": {ONE}}}</tool_call>', Place(**CALLS[0][1])
    text = call if method == "function_calling" else ONE
    writer, found = Writer(HERMES, text), list[Any]()
    model = ChatAgentSpec(model="m", runtime=Runtime(backends={"m": writer}))
    chain = model.with_structured_output(Place, method=method)
    for at in range(1, len(text) + 1):
        writer.most = at
        found.clear()
        for ask in (lambda: chain.invoke("go"), lambda: list(chain.stream("go"))[-1]):
            try:
                found.append(ask())
            except OutputParserException as error:
                assert "cut off at max_tokens" in str(error), error
        assert found in ([], [whole, whole]), text[:at]
        raw: Any = model.with_structured_output(Place, method=method, include_raw=True).invoke("go")
        assert (raw["parsed"], raw["parsing_error"] is None) == ((whole, True) if found else (None, False))
    assert found

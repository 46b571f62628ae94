"""Answers of LangChain's models cut off at any character: the whole call arrives, or none that could run."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.exceptions import OutputParserException
from langchain_core.tools import tool
from pydantic import BaseModel

from agentspec.backends.torch.text.structured_output import OutputParserSpec
from agentspec.backends.torch.text.tool_parser import HERMES, LLAMA, ToolFormat
from agentspec.langchain import ChatAgentSpec
from agentspec.protocol.requests import with_extra
from agentspec.runtime import Runtime
from agentspec.testing import FakeBackend
from agentspec.types import Delta, FinishReason, GenerateRequest, Usage

CALLS = [("erase", {"at": "é/b", "n": 12}), ("erase", {})]
ONE, TWO = (json.dumps(arguments, ensure_ascii=False) for _, arguments in CALLS)
PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}, "n": {"type": "integer"}}}
LLAMAS = f'{{"name": "erase", "parameters": {ONE}}}; {{"name": "erase", "parameters": {TWO}}}'
EVERY = pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
"""Between the characters at which an answer is cut off."""


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


@EVERY
@pytest.mark.parametrize("streaming", [False, True])
def test_an_agent_runs_no_call_that_was_cut_off(streaming: bool, every: int) -> None:
    ran: list[tuple[str, Any]] = []

    @tool
    def erase(at: str = "/", n: int = 0) -> str:
        """Erase what is there."""
        ran.append(("erase", {"at": at, "n": n}))
        return "erased"

    writer = Writer(LLAMA, LLAMAS)
    agent: Any = create_agent(ChatAgentSpec(model="m", runtime=Runtime(backends={"m": writer})), [erase])
    text, whole = writer.text, [CALLS[0], ("erase", {"at": "/", "n": 0})]
    for at in [*range(1, len(text), every), len(text)]:
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


@EVERY
@pytest.mark.parametrize("method", ["function_calling", "json_schema", "json_mode"])
def test_structured_output_says_that_it_was_cut_off(method: Any, every: int) -> None:
    call, whole = f'<tool_call>{{"name": "Place", "arguments": {ONE}}}</tool_call>', Place(**CALLS[0][1])
    text = call if method == "function_calling" else ONE
    writer, found = Writer(HERMES, text), list[Any]()
    model = ChatAgentSpec(model="m", runtime=Runtime(backends={"m": writer}))
    chain = model.with_structured_output(Place, method=method)
    for at in [*range(1, len(text), every), len(text)]:
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

"""Parses answers into a schema: from a tool call, from JSON of that schema, or from any JSON."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from operator import itemgetter
from typing import Any, Literal, cast

from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import LanguageModelInput
from langchain_core.output_parsers import BaseOutputParser, JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.runnables import Runnable, RunnableGenerator, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

from agentspec.langchain.messages import why_invalid
from agentspec.protocol.tools import CUT_OFF, whole_arguments

Method = Literal["function_calling", "json_schema", "json_mode"]
Schema = dict[str, Any] | type


def tool_parser(schema: Schema) -> Runnable[Any, Any]:
    """A parser of the first tool call's arguments into an instance of a pydantic class, else a dictionary."""
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        return PydanticToolsParser(tools=[schema], first_tool_only=True)
    return JsonOutputKeyToolsParser(key_name=_function(schema)["name"], first_tool_only=True)


def json_parser(schema: Schema) -> Runnable[Any, Any]:
    """A parser of the message's JSON text into an instance of a pydantic class, else a dictionary."""
    parser: BaseOutputParser[Any] = JsonOutputParser()
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        parser = PydanticOutputParser(pydantic_object=schema)
    return parser


def whole_only(parser: Runnable[Any, Any]) -> Runnable[Any, Any]:
    """`parser` after a check that the answer was written to its end: LangChain's parsers complete what was cut off.

    Raises `OutputParserException` for an answer that was cut off or refused before its call or its JSON had ended.
    """
    return RunnableGenerator(_checked, _achecked) | parser


def response_format(schema: Schema, method: Method, strict: bool | None) -> dict[str, Any]:
    """The `response_format` that asks an OpenAI-compatible server for `schema`."""
    if method == "json_mode":
        return {"type": "json_object"}
    function = _function(schema, strict=strict)
    described = {"name": function["name"], "schema": function["parameters"]}
    return {"type": "json_schema", "json_schema": described | ({} if strict is None else {"strict": strict})}


def with_raw(
    llm: Runnable[LanguageModelInput, Any], parser: Runnable[Any, Any]
) -> Runnable[LanguageModelInput, dict[str, Any]]:
    """Returns `{"raw": message, "parsed": value or None, "parsing_error": error or None}` in place of the value."""
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    both = RunnableMap(raw=llm) | parsed.with_fallbacks([failed], exception_key="parsing_error")
    return cast(Runnable[LanguageModelInput, dict[str, Any]], both)


def _checked(answer: Iterator[Any]) -> Iterator[Any]:
    chunks: list[Any] = []
    for chunk in answer:
        _check(chunks, chunk)
        yield chunk


async def _achecked(answer: AsyncIterator[Any]) -> AsyncIterator[Any]:
    chunks: list[Any] = []
    async for chunk in answer:
        _check(chunks, chunk)
        yield chunk


def _check(chunks: list[Any], chunk: Any) -> None:
    """Take a chunk of an answer, or a message. Raises `OutputParserException` where the answer ends unfinished."""
    chunks.append(chunk)
    finish = chunk.response_metadata.get("finish_reason")
    if finish is None:
        return
    message = chunk if len(chunks) == 1 else chunks[0] + chunks[1:]
    cut = finish in CUT_OFF and whole_arguments(message.text or "-", finish) is None
    if finish == "content_filter" or (not message.tool_calls and (cut or message.invalid_tool_calls)):
        raise OutputParserException(f"no whole answer to parse: {why_invalid(finish)}", llm_output=message.text)


def _function(schema: Schema, *, strict: bool | None = None) -> dict[str, Any]:
    function: dict[str, Any] = convert_to_openai_tool(schema, strict=strict)["function"]
    return function

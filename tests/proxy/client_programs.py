"""Small programs with agent frameworks, as their documentation shows them: `python client_programs.py NAME BASE_URL`.

They run in an environment of their own, without agentspec, and print what came out as one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import sys
from importlib.metadata import version
from typing import Any

QUESTION = "How warm is it in Rome?"
KEY = "none"


def temperature(place: str) -> float:
    """The temperature at a place, in degrees.

    Args:
        place: The name of the place.
    """
    assert place == "Rome", place
    return 23.75


def pydantic_ai(url: str) -> dict[str, Any]:
    """Text, a tool, structured output and a stream, with both of its model classes."""
    from pydantic import BaseModel
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Weather(BaseModel):
        place: str
        degrees: float

    async def streamed(agent: Any) -> str:
        async with agent.run_stream("Say hello.") as result:
            return "".join([piece async for piece in result.stream_text(delta=True)])

    found: dict[str, Any] = {}
    provider = OpenAIProvider(base_url=url, api_key=KEY)
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        model = kind("fake", provider=provider)
        form = Agent(model, output_type=Weather)
        found[kind.__name__] = {
            "text": Agent(model).run_sync("Say hello.").output,
            "tool": Agent(model, tools=[temperature]).run_sync(QUESTION).output,
            "form": form.run_sync("The weather in Rome, as a form.").output.model_dump(),
            "stream": asyncio.run(streamed(Agent(model))),
        }
    return found


def smolagents(url: str) -> dict[str, Any]:
    """A tool, then the final answer."""
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    model = OpenAIServerModel(model_id="fake", api_base=url, api_key=KEY)
    agent = ToolCallingAgent(tools=[tool(temperature)], model=model, max_steps=4, verbosity_level=0)
    return {"tool": agent.run(QUESTION)}


def llama_index(url: str) -> dict[str, Any]:
    """A chat, whole and streamed."""
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai import OpenAI

    model = OpenAI(model="gpt-4o-mini", api_base=url, api_key=KEY)
    messages = [ChatMessage(role="user", content="Say hello.")]
    stream = "".join(piece.delta or "" for piece in model.stream_chat(messages))
    return {"text": model.chat(messages).message.content, "stream": stream}


def autogen(url: str) -> dict[str, Any]:
    """A tool, then what the agent says about its result."""
    from autogen_agentchat.agents import AssistantAgent
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    abilities = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True}
    model = OpenAIChatCompletionClient(
        model="fake", base_url=url, api_key=KEY, model_info={**abilities, "family": "unknown"}
    )
    agent = AssistantAgent("weather", model_client=model, tools=[temperature], reflect_on_tool_use=True)
    result = asyncio.run(agent.run(task=QUESTION))
    return {"tool": result.messages[-1].content}


PROGRAMS = {
    "pydantic-ai-slim": pydantic_ai,
    "smolagents": smolagents,
    "llama-index-llms-openai": llama_index,
    "autogen-agentchat": autogen,
}


def main(name: str, url: str) -> None:
    print(json.dumps({"version": version(name), **PROGRAMS[name](url)}))


if __name__ == "__main__":
    main(*sys.argv[1:])

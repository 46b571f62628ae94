"""The official OpenAI client on a gateway that runs already (`agentspec serve`), with labels.

pip install openai
OPENAI_BASE_URL=http://127.0.0.1:8700/v1 python examples/proxy_client.py [MODEL]
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser

from openai import APIConnectionError, APIStatusError, DefaultHttpxClient, OpenAI

import agentspec
from agentspec import httpx_hooks, step

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8700/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "not needed unless the gateway has keys"),
    http_client=DefaultHttpxClient(event_hooks=httpx_hooks()),
)


@step("greet", workflow="example")
def greet(model: str) -> None:
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Say hello."}],
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage:
            print(f"\n{chunk.usage.completion_tokens} tokens, speculation: {chunk.model_extra or 'none'}")


if __name__ == "__main__":
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", help="without, the first that the gateway names")
    options = parser.parse_args()
    try:
        with client:
            greet(options.model or client.models.list().data[0].id)
    except APIConnectionError:
        sys.exit(f"no gateway at {client.base_url}: start one with `agentspec serve`, or set OPENAI_BASE_URL")
    except APIStatusError as error:
        sys.exit(f"{client.base_url}: {error}")
    print(agentspec.report())

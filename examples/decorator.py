"""`@step` on plain functions: every model call inside is labelled, timed and counted.

python examples/decorator.py
"""

from __future__ import annotations

from argparse import ArgumentParser

import agentspec
from agentspec import ChatAgentSpec, step

chat = ChatAgentSpec(model="smollm2-135m", temperature=0.0, max_tokens=24)


@step("draft", workflow="letters")
def draft(topic: str) -> str:
    return chat.invoke(f"Write one short sentence about {topic}.").text


@step("polish", workflow="letters")
def polish(sentence: str) -> str:
    # Mostly a copy of what is in the prompt already, which is what speculation is good at.
    return chat.invoke(f"Repeat this sentence, without changing a word: {sentence}").text


if __name__ == "__main__":
    ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    for topic in ("the sea", "the moon"):
        print(polish(draft(topic)))
    print(agentspec.report())

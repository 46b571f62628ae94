"""What is known of a conversation's next prompt before its last messages are: the beginning that all such prompts have.

Two renderings that differ in what is unknown show it, whatever the chat template makes of it: a frame around a tool's
result, thoughts that are left out, calls that are written in another way than the model wrote them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from agentspec.backends.torch.engine.prefix_cache import common_prefix
from agentspec.backends.torch.text.tokenizer import TokenizerAdapter
from agentspec.protocol.responses import Accumulator
from agentspec.types import GenerateRequest, Message

UNKNOWN = ("0", "x")  # two texts without a common beginning


def known_prompt(tokenizer: TokenizerAdapter, request: GenerateRequest) -> list[int]:
    """The token ids with which every prompt begins that goes on behind the messages of `request`. Raises
    `InvalidRequestError` for messages that the template refuses.
    """
    messages = list(request.messages or ())
    variants = (continued(messages, text) for text in UNKNOWN)
    first, second = (tokenizer.prompt(replace(request, messages=each, start_answer=False)) for each in variants)
    return first[: common_prefix(np.asarray(first), np.asarray(second))]


def continued(messages: list[Message], text: str) -> list[Message]:
    """The messages with `text` as what follows: results of the calls that have none yet, else the user's words."""
    if open_calls := unanswered(messages):
        return [*messages, *({"role": "tool", "tool_call_id": id, "content": text} for id in open_calls)]
    return [*messages, {"role": "user", "content": text}]


def unanswered(messages: list[Message]) -> list[str]:
    """The ids of the last answer's calls that no message has a result for."""
    last = next((at for at in reversed(range(len(messages))) if messages[at].get("role") == "assistant"), None)
    if last is None:
        return []
    answered = {message.get("tool_call_id") for message in messages[last + 1 :]}
    return [call["id"] for call in messages[last].get("tool_calls") or () if call.get("id") not in answered]


def after_calls(request: GenerateRequest, answer: Accumulator) -> GenerateRequest | None:
    """The request that follows an answer with tool calls, as far as it is known: OpenAI's clients do not send thoughts
    back. None for an answer without calls, for several answers, and for one that was continued.
    """
    choices = answer.all()
    calls: list[dict[str, Any]] = choices[0][1].extra.get("tool_calls") or []
    if len(choices) != 1 or not calls or request.messages is None or request.continue_final:
        return None
    said: Mapping[str, Any] = {"role": "assistant", "content": "".join(choices[0][1].text), "tool_calls": calls}
    return replace(request, messages=[*request.messages, said])

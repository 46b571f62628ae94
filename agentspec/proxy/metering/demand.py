"""How many tokens a request will take, estimated before it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentspec.backends.base import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from agentspec.proxy.body.amounts import CHOICES
from agentspec.proxy.forwarding.inspection import expected_choices
from agentspec.proxy.request_record import BYTES_PER_TOKEN

MEDIA_TOKENS = 1024  # of an image, a sound or a file, whatever bytes it takes
ANSWER_TOKENS = 256  # of an answer for which the request names no bound
_MOST = ("max_completion_tokens", "max_tokens", "max_output_tokens", "max_new_tokens", "n_predict", "num_predict")
_MEDIA = "image image_url input_image input_audio audio_url video_url input_file file document".split()
_ANSWERED = frozenset((CHAT, COMPLETIONS, MESSAGES, RESPONSES))  # others return vectors, or what the body's texts score
_MARKS = (b"base64", b"input_audio")  # a body without them holds text alone


@dataclass(frozen=True, slots=True)
class Demand:
    """The tokens of a request's prompt and answers. `bounded`: the request itself says how long an answer may be.
    `background`: its answer comes to another request.
    """

    prompt: int
    answer: int
    bounded: bool = True
    background: bool = False

    @property
    def least(self) -> int:
        """What there must be room for: of an answer without a bound nobody knows."""
        return self.prompt + (self.answer if self.bounded else 0)

    def untold(self, arrived: int) -> int:
        """What stands for the tokens of an answer that told none, but of which so many arrived."""
        return self.prompt + (self.answer if self.bounded else max(self.answer, arrived))

    def within(self, limit: int | None) -> int:
        """What is charged under a limit: what is guessed of an answer makes no request too large for it."""
        whole = self.prompt + self.answer
        return whole if limit is None else min(whole, max(self.least, limit))


def demand_of(path: str, body: bytes, fields: Mapping[str, Any]) -> Demand:
    """What the request with this body, read as `fields`, will take. Never raises: its fields are not checked yet."""
    prompt = -(-_text_bytes(body, fields) // BYTES_PER_TOKEN)
    given = [value for name in _MOST if type(value := fields.get(name)) is int and value >= 0]
    if not given and path not in _ANSWERED:
        return Demand(prompt, 0)
    choices = expected_choices(path, fields)
    wanted = [value for name in CHOICES if type(value := fields.get(name)) is int and value > 0]
    each = max(given) if given else ANSWER_TOKENS
    answer = each * max(choices, *wanted, 1)
    return Demand(
        prompt, answer, bounded=bool(given), background=path == RESPONSES and fields.get("background") is True
    )


def may_hold_media(body: bytes) -> bool:
    """Whether `demand_of` looks at each value of the body, which takes a while if that is large."""
    return any(mark in body for mark in _MARKS)


def _text_bytes(body: bytes, fields: Mapping[str, Any]) -> int:
    """The bytes of the body, those of media left out and counted as so many tokens."""
    if not may_hold_media(body):
        return len(body)
    size, waiting = 0, [fields]
    while waiting:
        one: Any = waiting.pop()
        if isinstance(one, str):
            size += len(one.encode("utf-8", "replace"))
        elif isinstance(one, list):
            waiting += one
        elif not isinstance(one, Mapping):
            size += BYTES_PER_TOKEN
        elif one.get("type") in _MEDIA:
            size += MEDIA_TOKENS * BYTES_PER_TOKEN
        else:
            waiting += one.values()
    return size

"""Fills `prediction` for upstreams that know it, from what the same tenant was answered before.

Rejected tokens of a prediction are billed, so nothing is predicted until the answers that could have been predicted
were mostly right: each answer is compared with the earlier ones, whether they were sent as a prediction or not.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import anyio

from agentspec.backends.base import Forwards
from agentspec.cache.responses import StoredResponse
from agentspec.errors import AgentSpecError
from agentspec.proxy.admission.auth import Caller
from agentspec.proxy.forwarding.answer_edits import AnswerEdits, choice_text
from agentspec.proxy.forwarding.inspection import read_counts
from agentspec.proxy.logs import logger
from agentspec.runtime import Runtime
from agentspec.speculation.predicted_text import PredictedText
from agentspec.types import Delta, Usage

HEADER = "x-agentspec-auto-prediction"
MIN_SEEN = 3  # answers of a kind that must have been compared before one is predicted
MAX_CHARACTERS = 1 << 18  # of an answer that is kept
MAX_KINDS = 4096  # whose rates are known
REFUSED_SECONDS = 600.0  # without predictions, after one went with a request that was refused
PATIENCE = 20.0  # seconds to keep an answer
LOOKUP_SECONDS = 5.0  # for an earlier answer, after which the request goes on without
_AT_ONCE = 4  # threads that look answers up or keep them
_RATE_STEP = 0.2  # how far the newest answer moves the rate
_REFUSALS = (400, 422)  # with which the upstream has not begun to answer
_NAMED = re.compile(rb"prediction", re.IGNORECASE)
_MAX_ERROR = 1 << 16  # bytes of an error answer that are searched
_WORD = re.compile(r"\s*\w+|\s*[^\w\s]|\s+")
# Fields with which OpenAI refuses a prediction, or which make several answers of one.
_EXCLUDING = (
    "tools functions logprobs top_logprobs max_completion_tokens audio modalities web_search_options prediction"
    " best_of".split()
)
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
}

T = TypeVar("T")

Scope = tuple[str, str, str]
"""Tenant, backend and model."""
Kind = tuple[str, ...]
"""Whose answers a rate is of: tenant, backend, model, workflow, step, and how the earlier answer was found."""


@dataclass(slots=True)
class _Rate:
    """How much of the earlier answer was right: a running mean over `seen` answers."""

    value: float = 0.0
    seen: int = 0

    def add(self, share: float) -> None:
        self.seen += 1
        self.value += (share - self.value) * max(_RATE_STEP, 1 / self.seen)

    @property
    def expected(self) -> float:
        return self.value if self.seen >= MIN_SEEN else 0.0


class AcceptanceRates:
    """The rates of the kinds that were used last. For one event loop."""

    def __init__(self) -> None:
        self._rates: OrderedDict[Kind, _Rate] = OrderedDict()

    def expected(self, kind: Kind) -> float:
        """The share of right tokens to expect; 0 until enough was seen."""
        return self._rates[kind].expected if kind in self._rates else 0.0

    def add(self, kind: Kind, share: float) -> None:
        self._rates.setdefault(kind, _Rate()).add(share)
        self._rates.move_to_end(kind)
        if len(self._rates) > MAX_KINDS:
            self._rates.popitem(last=False)


@dataclass(slots=True)
class AutoPredictions:
    """Predicts answers of upstreams from the answers stored for the same tenant, and stores further ones."""

    runtime: Runtime
    rates: AcceptanceRates = field(default_factory=AcceptanceRates)
    _refused: OrderedDict[Scope, float] = field(default_factory=OrderedDict)
    _limiter: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(_AT_ONCE))

    async def begin(
        self, backend: Forwards, name: str, model: str, fields: Mapping[str, Any], caller: Caller
    ) -> PredictedAnswer | None:
        """What may be predicted for a chat with `fields`, for `model` of the backend `name`; None if nothing ever is.

        Nothing is for vLLM and SGLang, which draft by themselves.
        """
        if not (may_predict(fields) and caller.speculation) or await backend.server_kind() != "other":
            return None
        scope = (caller.tenant, name, model)
        if self._refused.get(scope, 0.0) > time.monotonic():
            return None
        ids = await asyncio.to_thread(_ids, scope, caller, fields["messages"])
        answer = PredictedAnswer(self, scope, caller, ids)
        try:
            await answer.find(backend.settings.auto_prediction or 1.0)
        except AgentSpecError as error:  # the request goes on without
            logger.warning("earlier answers cannot be read", error=error.message)
        return answer

    def refused(self, scope: Scope) -> None:
        """Predict nothing there for some time: the upstream may not take predictions for this model."""
        logger.warning("a request with a prediction was refused: none are sent for a while", backend=scope[1])
        self._refused[scope] = time.monotonic() + REFUSED_SECONDS
        if len(self._refused) > MAX_KINDS:
            self._refused.popitem(last=False)

    async def get(self, tenant: str, id: str) -> str | None:
        """The text of an earlier answer of the tenant; None also if that takes long."""
        found: StoredResponse | None = None
        with anyio.move_on_after(LOOKUP_SECONDS):
            found = await self._in_thread(lambda: self.runtime.responses.get(tenant, id))
        text = found.response.get("text") if found else None
        return text if isinstance(text, str) and text else None

    async def put(self, caller: Caller, ids: Sequence[str], text: str) -> None:
        """Keep the text of an answer, unless nothing is stored here or a pattern refuses it."""
        cache = self.runtime.settings.cache
        if not (caller.store and cache.store):
            return

        def put() -> None:
            if any(re.search(one, text) for one in cache.refuse_patterns):
                return
            for id in ids:
                kept = StoredResponse(id, caller.tenant, time.time(), caller.labels.session, response={"text": text})
                self.runtime.responses.put(kept)

        with anyio.move_on_after(PATIENCE):
            await self._in_thread(put)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await anyio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._limiter)


class PredictedAnswer(AnswerEdits):
    """One answer: predicted if that is likely to pay, and compared with what could have been predicted.

    `text` is the prediction, None where none is sent; `withdrawn`: one was sent, and the upstream refused it.
    """

    def __init__(self, predictions: AutoPredictions, scope: Scope, caller: Caller, ids: Mapping[str, str]) -> None:
        self.text: str | None = None
        self.expected = 0.0
        self.withdrawn = False
        self.tells = True  # in `speculation`
        self._predictions = predictions
        self._scope = scope
        self._caller = caller
        self._ids = ids
        self._kinds = {how: (*scope, caller.labels.workflow or "", caller.labels.step or "", how) for how in ids}
        self._earlier: dict[str, str] = {}
        self._pieces: list[str] = []
        self._room = MAX_CHARACTERS
        self._usage: Usage | None = None
        self._whole = False

    async def find(self, threshold: float) -> None:
        """Look earlier answers up, and choose the one that is expected to be right most, from `threshold` on."""
        for how, id in self._ids.items():
            text = await self._predictions.get(self._caller.tenant, id)
            if text is None:
                continue
            self._earlier[how] = text
            expected = self._predictions.rates.expected(self._kinds[how])
            if expected >= threshold and expected > self.expected:
                self.text, self.expected = text, expected

    @property
    def fields(self) -> dict[str, Any]:
        """The fields that the request gets."""
        return {} if self.text is None else {"prediction": {"type": "content", "content": self.text}}

    @property
    def digest(self) -> str:
        """What tells the request with this prediction from others; empty without one."""
        return "" if self.text is None else hashlib.sha256(self.text.encode("utf-8", "replace")).hexdigest()[:16]

    @property
    def headers(self) -> dict[str, str]:
        """The headers that the answer gets."""
        return {} if self.text is None else {HEADER: f"{self.expected:.2f}"}

    @cached_property
    def _speculation(self) -> dict[str, Any]:
        return {"auto_prediction": True, "expected_acceptance": round(self.expected, 4)}

    def follow(self, delta: Delta) -> None:
        """Follow an answer that comes in deltas."""
        self._add(delta.text)
        self._whole = self._whole or delta.finish_reason == "stop"
        self._usage = delta.usage or self._usage

    async def edits(self, answer: dict[str, Any], *, whole: bool) -> dict[str, Any]:
        """Follow the answer; one that was predicted says so in its `speculation`."""
        choices = answer.get("choices")
        reason = None
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict):
                self._add(choice_text(choice))
                reason = choice.get("finish_reason") or reason
        self._whole = self._whole or reason == "stop"
        self._usage = read_counts(answer).usage or self._usage
        given = answer.get("speculation")
        if self.text is None or not self.tells or not (whole or reason) or not isinstance(given, dict | None):
            return {}
        return {"speculation": {**(given or {}), **self._speculation}}

    def withdraw(self, status: int, content: bytes) -> bool:
        """Whether an error answer refuses the prediction; if so, there is none any more, and the rest may go again."""
        if self.text is None or status not in _REFUSALS or not _NAMED.search(content[:_MAX_ERROR]):
            return False
        self.text, self.withdrawn = None, True
        self._predictions.refused(self._scope)
        return True

    async def finish(self, status: int) -> None:
        """Learn from the answer of this HTTP `status` and keep it, if it came whole, also where the client has left."""
        if self.text is not None and status in _REFUSALS:
            self._predictions.refused(self._scope)
        text = "".join(self._pieces)
        if self._whole and text and self._room > 0:
            await _to_the_end(asyncio.create_task(self._learn(text)))

    async def _learn(self, text: str) -> None:
        shares = await asyncio.to_thread(lambda: {how: _right(one, text) for how, one in self._earlier.items()})
        for how, share in shares.items():
            sent = self.text is not None and self._earlier[how] == self.text
            self._predictions.rates.add(self._kinds[how], self._told(share) if sent else share)
        try:
            await self._predictions.put(self._caller, list(self._ids.values()), text)
        except AgentSpecError as error:
            logger.warning("an answer is not kept for predictions", error=error.message)

    def _add(self, text: str) -> None:
        self._pieces.append(text[: self._room])
        self._room -= len(text)

    def _told(self, share: float) -> float:
        """The share of right tokens as the upstream counted them, else `share`."""
        usage = self._usage or Usage(0, 0)
        try:
            accepted, rejected = usage.accepted_prediction_tokens or 0, usage.rejected_prediction_tokens or 0
            return accepted / (accepted + rejected)
        except (ArithmeticError, TypeError):
            return share


async def _to_the_end(task: asyncio.Task[None]) -> None:
    """Wait for `task`, and a while longer where the request is cancelled meanwhile."""
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,), timeout=PATIENCE)
        raise


def may_predict(fields: Mapping[str, Any]) -> bool:
    """Whether a prediction goes with all other fields of a chat."""
    if any(fields.get(name) not in (None, False, []) for name in _EXCLUDING):
        return False
    if any(fields.get(name) not in neutral for name, neutral in _NEUTRAL.items()):
        return False
    messages = fields.get("messages")
    return isinstance(messages, list) and bool(messages)


def _ids(scope: Sequence[str], caller: Caller, messages: Any) -> dict[str, str]:
    """Under which ids an earlier answer may be: the one to the same messages, and the latest of the step or session.

    No client can ask for these ids as stored responses, since they hold blanks.
    """
    labels = caller.labels
    ids = {"messages": _id(scope, "messages", messages)}
    if labels.step:
        ids["step"] = _id(scope, "step", [labels.workflow, labels.step])
    elif labels.session:
        ids["session"] = _id(scope, "session", [labels.session])
    return ids


def _id(scope: Sequence[str], how: str, what: Any) -> str:
    named = json.dumps([*scope, how, what], sort_keys=True).encode()
    return f"predicted {how} {hashlib.sha256(named).hexdigest()}"


def _right(predicted: str, answer: str) -> float:
    """Which share of the words of `predicted` appears in `answer`, as a prediction is followed."""
    numbers: dict[str, int] = {}
    words = [[numbers.setdefault(word, len(numbers)) for word in _WORD.findall(text)] for text in (predicted, answer)]
    followed = PredictedText(words[0])
    followed.follow(words[1])
    return min(1.0, followed.accepted / max(1, len(words[0])))

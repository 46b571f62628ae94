"""While a client's tools run, has vLLM and SGLang read what is known of its next prompt: by a request for one token.

Both keep what they have read of a prompt, in blocks, for requests that begin alike. Only upstreams whose operator set
`prefill_next_turn` are asked, and none that has requests waiting. No other kind of server ever is.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter, OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentspec.backends.base import CHAT, Forwards
from agentspec.backends.openai.hints import PRIORITY
from agentspec.backends.pool.load import ServerLoad, parse_load
from agentspec.errors import AgentSpecError
from agentspec.protocol.deltas import size_of, to_delta
from agentspec.protocol.headers import MAX_PRIORITY, PREFIX
from agentspec.protocol.responses import Accumulator
from agentspec.proxy.admission.auth import Caller
from agentspec.proxy.forwarding.answer_edits import AnswerEdits
from agentspec.proxy.forwarding.passthrough import added_fields, request_headers
from agentspec.proxy.logs import logger

if TYPE_CHECKING:
    from agentspec.proxy.endpoint import Exchange

KINDS = ("vllm", "sglang")
MOST_CREDIT = 4.0  # prefills that may be saved up
MOST_TURNS = 1024  # whose tools run and that are remembered
MOST_BYTES = 1 << 20  # of a body, which is kept while its answer comes, and of the answer
SECONDS = 30.0  # for a whole prefill
METRICS_BYTES = 4 << 20
_SHAPING = (  # the fields of a chat that its prompt depends on
    "model",
    "tools",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "reasoning_effort",
    "add_special_tokens",
    "mm_processor_kwargs",
    "cache_salt",
    "extra_key",
    "lora_path",
)
_KEYS = ("authorization", "x-api-key")

_UNREADABLE = (AgentSpecError, LookupError, TypeError, ValueError, AttributeError)  # an answer that nobody can follow
TurnKey = tuple[str, str]  # tenant and the id of a call: some servers number calls, so that ids recur


@dataclass(frozen=True, slots=True)
class UpstreamChat:
    """One forwarded chat: where it goes, whose it is, and the fields that its prompt depends on."""

    name: str
    backend: Forwards
    model: str
    caller: Caller
    headers: Mapping[str, str]
    messages: list[Any]
    shaping: Mapping[str, Any]

    @classmethod
    def of(cls, exchange: Exchange, backend: Forwards, messages: list[Any]) -> UpstreamChat:
        headers = request_headers(exchange.scope, exchange.record)
        kept = {key: value for key, value in headers.items() if key.startswith(PREFIX) or key in _KEYS}
        shaping = {key: exchange.fields[key] for key in _SHAPING if exchange.fields.get(key) is not None}
        route = exchange.route
        return cls(route.backend_name, backend, route.upstream_model, exchange.caller, kept, messages, shaping)


class FollowedAnswer(AnswerEdits):
    """Follows the answer to a chat, and tells `turns` of its tool calls, if it is no longer than a body may be. `inner`
    edits it as it would alone.
    """

    def __init__(self, turns: UpstreamTurns, chat: UpstreamChat, inner: AnswerEdits | None) -> None:
        self._turns, self._chat, self._inner = turns, chat, inner
        self._answer, self._size = Accumulator(), 0

    async def edits(self, answer: dict[str, Any], *, whole: bool) -> dict[str, Any]:
        with suppress(*_UNREADABLE):
            delta = to_delta(answer)
            self._size += size_of(delta)
            if self._size <= MOST_BYTES:
                self._answer.add(delta)
                if delta.finish_reason == "tool_calls":
                    self._turns.ended(self._chat, self._answer)
        return {} if self._inner is None else await self._inner.edits(answer, whole=whole)


@dataclass(slots=True)
class UpstreamTurns:
    """The next turns of the clients of all upstreams. `counts` are by upstream and outcome: launched, used (the turn
    came after it), cancelled (the turn came meanwhile), failed.
    """

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    _credit: dict[str, float] = field(default_factory=dict)
    _tasks: OrderedDict[TurnKey, tuple[str, asyncio.Task[bool]]] = field(default_factory=OrderedDict)
    _running: dict[str, asyncio.Task[bool]] = field(default_factory=dict)  # by upstream

    def followed(self, exchange: Exchange, backend: Forwards, edits: AnswerEdits | None) -> AnswerEdits | None:
        """What follows the answer to a chat: `edits`, and the next turn where that may be read ahead."""
        share, messages = backend.settings.prefill_next_turn, exchange.fields.get("messages")
        if share is None or not isinstance(messages, list):
            return edits
        name, caller = exchange.route.backend_name, exchange.caller
        self._came(caller.tenant, messages)
        self._credit[name] = min(MOST_CREDIT, self._credit.get(name, 0.0) + share)
        wanted = caller.prefill and caller.store and exchange.fields.get("tools")
        wanted = wanted and exchange.fields.get("n") in (None, 1)
        if not wanted or len(exchange.body) > MOST_BYTES:
            return edits
        return FollowedAnswer(self, UpstreamChat.of(exchange, backend, messages), edits)

    def ended(self, chat: UpstreamChat, answer: Accumulator) -> None:
        """An answer has ended in tool calls: read ahead what is known, if there is credit left."""
        body = next_turn(chat, answer)
        if body is None or self._credit.get(chat.name, 0.0) < 1.0 or self._reads(chat.name):
            return
        self._credit[chat.name] -= 1.0
        task = self._running[chat.name] = asyncio.create_task(self._read(chat, body))
        self._tasks[chat.caller.tenant, str(body["messages"][-1]["tool_call_id"])] = (chat.name, task)
        while len(self._tasks) > MOST_TURNS:
            self._tasks.popitem(last=False)[1][1].cancel()

    def _reads(self, name: str) -> bool:
        task = self._running.get(name)
        return task is not None and not task.done()

    async def aclose(self) -> None:
        """Cancel what runs."""
        tasks = [*self._running.values()]
        self._tasks.clear()
        self._running.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _came(self, tenant: str, messages: list[Any]) -> None:
        """The next turn has come: what still runs for it would read the same twice."""
        for message in reversed(messages):
            if not isinstance(message, dict) or message.get("role") != "tool":
                return
            name, task = self._tasks.pop((tenant, str(message.get("tool_call_id"))), ("", None))
            if task is not None and not task.cancel() and task.result():
                self.counts[name, "used"] += 1

    async def _read(self, chat: UpstreamChat, body: dict[str, Any]) -> bool:
        """Send the request, unless the server is another one or is busy; whether it was read. Never raises."""
        try:
            async with asyncio.timeout(SECONDS) as limit:
                if await chat.backend.server_kind() in KINDS and await is_free(chat.backend):
                    return await self._send(chat, body, limit)
        except Exception as error:
            self.counts[chat.name, "failed"] += 1
            logger.warning("a next turn is not read ahead", backend=chat.name, error=type(error).__name__)
        return False

    async def _send(self, chat: UpstreamChat, body: dict[str, Any], limit: asyncio.Timeout) -> bool:
        if chat.backend.settings.priority != "off":
            body[PRIORITY] = MAX_PRIORITY
        body |= await added_fields(chat.backend, CHAT, body, chat.caller, chat.model)
        self.counts[chat.name, "launched"] += 1
        content = await asyncio.to_thread(lambda: json.dumps(body, ensure_ascii=False).encode("utf-8", "replace"))
        headers = {**chat.headers, "content-type": "application/json", "accept": "application/json"}
        try:
            async with chat.backend.forward(
                "POST", CHAT, headers=headers, body=content, tenant=chat.caller.tenant
            ) as response:
                await response.aread()
        except asyncio.CancelledError:
            if not limit.expired():  # one that took too long has failed
                self.counts[chat.name, "cancelled"] += 1
            raise
        if response.status >= 400:
            self.counts[chat.name, "failed"] += 1
            self._credit[chat.name] = -MOST_CREDIT  # so it is tried again, but not soon
        return response.status < 400


def next_turn(chat: UpstreamChat, answer: Accumulator) -> dict[str, Any] | None:
    """The body of a request for one token behind what is known: the calls have empty results. None without calls."""
    choice = answer.all()[0][1]
    calls = choice.extra.get("tool_calls") or []
    ids = [call.get("id") for call in calls]
    if not calls or not all(isinstance(id, str) and id for id in ids):
        return None
    said = {"role": "assistant", "content": "".join(choice.text) or None, "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": id, "content": ""} for id in ids]
    return {**chat.shaping, "messages": [*chat.messages, said, *results], "max_tokens": 1}


async def is_free(backend: Forwards) -> bool:
    """Whether the server says that nothing waits. One that does not say is not asked for more."""
    async with backend.forward("GET", "/metrics", headers={}, above=True) as response:
        if response.status != 200:
            return False
        load: ServerLoad | None = parse_load((await response.aread(METRICS_BYTES)).decode("utf-8", "replace"))
    return load is not None and not load.waiting

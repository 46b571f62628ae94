"""`AgentSpecMiddleware`: labels every model call of a LangChain agent, whatever chat model it uses."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar
from urllib.parse import urlsplit

from langchain.agents.middleware import AgentMiddleware, AgentState
from langchain.agents.middleware.types import ModelCallResult, ModelRequest, ModelResponse
from langchain_core.globals import get_llm_cache
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langgraph.prebuilt.tool_node import ToolCallRequest

from agentspec.errors import ConfigurationError
from agentspec.langchain.early_tools import EarlyTools
from agentspec.langchain.labels import labels_of_agent
from agentspec.langchain.messages import usage_of
from agentspec.protocol.policy import StepPolicy
from agentspec.step.report import headers, model_call, unmetered
from agentspec.step.scope import current, current_model, current_policy, entered
from agentspec.telemetry import tracing
from agentspec.tools import ToolSession
from agentspec.types import Labels, Usage

R = TypeVar("R")

_TAKE_HEADERS = ("BaseChatOpenAI", "ChatAnthropic")  # their calls take `extra_headers`
_URL_FIELDS = ("openai_api_base", "anthropic_api_url", "base_url")
_TOOLS_NODE = "tools"  # what `create_agent` calls the node in which tools run
_HOSTED = ("openai.com", "azure.com", "anthropic.com")


class AgentSpecMiddleware(AgentMiddleware[AgentState[Any], Any, Any]):
    """Labels and counts the model calls of an agent: `create_agent(model, tools, middleware=[AgentSpecMiddleware()])`.

    The workflow is `workflow`, else the name of a `workflow` block, of a labelled graph, or of the agent. The step is
    the node, or the agent's name where it is one of several in a workflow. The session is `session`, else the
    `thread_id`. `ChatAgentSpec` takes the labels over; ChatOpenAI and ChatAnthropic send them as headers,
    unless their endpoint is the vendor's own (`send_headers` decides otherwise) or LangChain caches their answers.

    `policy` is what the agent asks of its calls, `policies` what the steps of these names ask
    before it. `early_tools` starts tools before the model calls them: names of read-only tools, or `EarlyTools`.
    """

    def __init__(
        self,
        *,
        workflow: str | None = None,
        session: str | None = None,
        policy: StepPolicy | None = None,
        policies: Mapping[str, StepPolicy] | None = None,
        send_headers: bool | None = None,
        early_tools: EarlyTools | Collection[str] | None = None,
    ) -> None:
        super().__init__()
        self.tools = []
        self.workflow = workflow
        self.session = session
        self.policy = policy or StepPolicy()
        self.policies = dict(policies or {})
        for given in (self.policy, *self.policies.values()):
            if not isinstance(given, StepPolicy):
                raise ConfigurationError(f"write a policy as StepPolicy(...), not {given!r}", param="policy")
        self.send_headers = send_headers
        self.early_tools = early_tools if isinstance(early_tools, EarlyTools | None) else EarlyTools(early_tools)

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelCallResult[Any]:
        turn = None
        if self.early_tools is not None:
            with self._as_tool(_TOOLS_NODE) as known:
                turn = self.early_tools.begin(request) if known else None
        with self._labelled(turn) as count, _followed(self.early_tools, turn) as end:
            return end(count(handler(self._with_settings(request))))

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelCallResult[Any]:
        turn = None
        if self.early_tools is not None:
            with self._as_tool(_TOOLS_NODE) as known:
                turn = await self.early_tools.abegin(request) if known else None
        with self._labelled(turn) as count, _followed(self.early_tools, turn) as end:
            return end(count(await handler(self._with_settings(request))))

    def wrap_tool_call(self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], R]) -> R:
        with _tool_span(request) as show:
            if self.early_tools is None:
                return show(handler(request))
            with self._as_tool():
                return show(self.early_tools.run(request, handler))

    async def awrap_tool_call(self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Awaitable[R]]) -> R:
        with _tool_span(request) as show:
            if self.early_tools is None:
                return show(await handler(request))
            with self._as_tool():
                return show(await self.early_tools.arun(request, handler))

    def _scope(self, node: str | None = None) -> tuple[Labels, StepPolicy]:
        """The labels and the policy of what the agent's present node does, or another `node` of it."""
        labels = labels_of_agent(self.workflow, self.session, node=node)
        return labels, self.policies.get(labels.step or "", self.policy).inside(self.policy)

    @contextmanager
    def _as_tool(self, node: str | None = None) -> Iterator[bool]:
        """Inside, labels and policy are those of a tool; `node` is that of the tools, where another one runs now.

        False if they cannot be known in another node, as a deadline that begins there.
        """
        labels, policy = self._scope(node)
        with unmetered() if node else nullcontext(), entered(current.get().narrowed(labels, policy)):
            yield node is None or policy.deadline_s is None

    @contextmanager
    def _labelled(self, turn: ToolSession | None) -> Iterator[Callable[[ModelResponse[Any]], ModelResponse[Any]]]:
        """Label the model call made inside. It is counted by its answer, unless its client counts it itself."""
        with model_call(*self._scope(), turn.take_used() if turn else 0) as meter:

            def count(response: ModelResponse[Any]) -> ModelResponse[Any]:
                meter.usage = _usage(response.result)
                return response

            yield count

    def _with_settings(self, request: ModelRequest[Any]) -> ModelRequest[Any]:
        """The request with the headers, and the model's name of the policy, for clients other than our own.

        What is in the request's own settings comes first.
        """
        settings: dict[str, Any] = {}
        model = current_model()
        if model is not None and _takes_settings(request.model) and "model" not in request.model_settings:
            settings["model"] = model
        if self._sends_headers(request.model):
            settings["extra_headers"] = {**headers(), **(request.model_settings.get("extra_headers") or {})}
        return request.override(model_settings={**request.model_settings, **settings})

    def _sends_headers(self, model: BaseChatModel) -> bool:
        if _is_cached(model) or not _takes_settings(model):
            return False
        return not _is_hosted(model) if self.send_headers is None else self.send_headers


@contextmanager
def _tool_span(request: ToolCallRequest) -> Iterator[Callable[[R], R]]:
    """Around a tool that the model called: a span, which may hold arguments and result where texts are captured."""
    call = request.tool_call
    named = {"gen_ai.tool.name": call["name"], "gen_ai.tool.call.id": call["id"], "gen_ai.tool.type": "function"}
    with tracing.span("execute_tool", call["name"], named) as span:
        captured = span is not None and current_policy().store is not False and tracing.captures_content()
        if span is not None and captured:
            span.set({"gen_ai.tool.call.arguments": json.dumps(call["args"], default=str)})

        def show(result: R) -> R:
            if span is not None and captured:
                span.set({"gen_ai.tool.call.result": str(getattr(result, "content", result))})
            if span is not None and getattr(result, "status", None) == "error":
                span.set({"error.type": "tool_error"})
            return result

        yield show


@contextmanager
def _followed(
    early: EarlyTools | None, turn: ToolSession | None
) -> Iterator[Callable[[ModelResponse[Any]], ModelResponse[Any]]]:
    """Around a model call: its answer ends the turn, a failure abandons it."""

    def end(response: ModelResponse[Any]) -> ModelResponse[Any]:
        if early is not None:
            early.end(turn, response)
        return response

    try:
        yield end
    except BaseException:
        if turn is not None:
            turn.abandon_turn()
        raise


def _takes_settings(model: BaseChatModel) -> bool:
    """Whether a call of the model takes `model` and `extra_headers`, and sends them."""
    return any(kind.__name__ in _TAKE_HEADERS for kind in type(model).__mro__)


def _is_cached(model: BaseChatModel) -> bool:
    """Whether LangChain may answer from its own cache, whose key headers would change."""
    return model.cache is not False and (bool(model.cache) or get_llm_cache() is not None)


def _is_hosted(model: BaseChatModel) -> bool:
    """Whether the model's endpoint is a vendor's, which does not read the labels."""
    client = getattr(model, "root_client", None) or getattr(model, "root_async_client", None)
    urls = [getattr(client, "base_url", None), *(getattr(model, name, None) for name in _URL_FIELDS)]
    host = next((urlsplit(str(url)).hostname or "" for url in urls if url), "")
    return not host or any(host == name or host.endswith("." + name) for name in _HOSTED)


def _usage(messages: Iterable[Any]) -> Usage | None:
    """The tokens of an agent's answer; None if its model does not say."""
    found = (usage_of(message) for message in messages if isinstance(message, AIMessage))
    return next((usage for usage in found if usage), None)

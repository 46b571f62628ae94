"""Early starts for an agent written in plain Python: `@tool` marks its functions, `agent_tools` runs them."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, update_wrapper, wraps
from typing import Any, Generic, ParamSpec, TypeVar, cast, overload

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ArgsKwargs

from agentspec.errors import ConfigurationError, InvalidRequestError
from agentspec.step.scope import current_policy
from agentspec.tools.faults import kept_from_agent
from agentspec.tools.keys import AgentCaller
from agentspec.tools.policy import ToolPolicy, ToolSpec
from agentspec.tools.prediction.history import ToolCall
from agentspec.tools.session import ToolSession
from agentspec.tools.speculator import ToolSpeculator

P = ParamSpec("P")
R = TypeVar("R")
Message = Mapping[str, Any]


class PythonTool(Generic[P, R]):
    """A function that a model may call; it can be called as before. `schema` is the JSON schema of its arguments."""

    def __init__(self, function: Callable[P, R], *, read_only: bool, max_age: float | None) -> None:
        self._arguments = _arguments(function)
        update_wrapper(self, function)
        self.function = function
        self.read_only = read_only
        self.max_age = max_age
        self.name = function.__name__
        self.description = inspect.getdoc(function) or ""
        self.schema = _schema(self._arguments)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    def answer(self, arguments: Mapping[str, Any]) -> R:
        """What the function returns for a model's arguments, which are made what its annotations say, such as a date.

        Raises `InvalidRequestError` for arguments that do not fit, and what the function raises.
        """
        try:
            args, kwargs = self._arguments.validate_python(ArgsKwargs((), dict(arguments)))
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()[:3])
            raise InvalidRequestError(f"the model called {self.name} with arguments that do not fit: {wrong}") from None
        function: Callable[..., R] = self.function  # the arguments were checked above
        return function(*args, **kwargs)

    @property
    def definition(self) -> dict[str, Any]:
        """The tool as the chat API's `tools` names it."""
        about = {"name": self.name, "description": self.description, "parameters": self.schema}
        return {"type": "function", "function": about}


@overload
def tool(function: Callable[P, R], /) -> PythonTool[P, R]: ...


@overload
def tool(*, read_only: bool = False, max_age: float | None = None) -> Callable[[Callable[P, R]], PythonTool[P, R]]: ...


def tool(function: Any = None, /, *, read_only: bool = False, max_age: float | None = None) -> Any:
    """Mark a function as a tool. `read_only=True` says that it changes nothing, so that it may be started early.

    Its result may wait `max_age` seconds for the model's call, by default 30. The function may be a coroutine function.
    Raises `TypeError` for a generator, which would run when its result is read, for what takes unnamed arguments and
    for what is no function, and `ConfigurationError` for a `max_age` that means nothing.
    """
    if max_age is not None:
        if not read_only:
            message = "max_age is for results of early starts: set read_only=True besides, or leave it out"
            raise ConfigurationError(message, param="max_age")
        ToolPolicy(max_age=max_age)  # refuses what is no age

    def decorate(function: Callable[P, R]) -> PythonTool[P, R]:
        return PythonTool(function, read_only=read_only, max_age=max_age)

    return decorate if function is None else decorate(function)


class AgentTools:
    """The tools of one session of an agent, from `agent_tools`."""

    def __init__(self, tools: Sequence[PythonTool[Any, Any]], session: ToolSession) -> None:
        self._tools = {one.name: one for one in tools}
        self._session = session
        self._heard = 0
        session.offers([ToolSpec(one.name, one.schema) for one in tools])

    @property
    def definitions(self) -> list[dict[str, Any]]:
        """All tools as the chat API's `tools` names them."""
        return [one.definition for one in self._tools.values()]

    def before_model(self, messages: Sequence[Any]) -> None:
        """Start the tools that the model is likely to call next. `messages` are those that it is given, all of them, as
        dictionaries or as the OpenAI client's objects.
        """
        self._hear(messages)
        self._session.begin_turn(self._start)

    async def abefore_model(self, messages: Sequence[Any]) -> None:
        """`before_model` in an event loop."""
        self._hear(messages)
        await self._session.abegin_turn(
            self._ainvoke,
            lambda call: None if inspect.iscoroutinefunction(self._known(call).function) else self._start,
        )

    def hears(self, chunk: Any) -> None:
        """A chunk of the model's streamed answer: a tool that it names starts if that pays still.

        It is a dictionary or an object of the OpenAI client. Whoever does not stream leaves this out.
        """
        for choice in _mapping(chunk).get("choices") or ():
            for call in (choice.get("delta") or {}).get("tool_calls") or ():
                name = (call.get("function") or {}).get("name")
                if name:
                    self._session.names(name)

    def after_model(self, message: Any) -> list[tuple[str, ToolCall]]:
        """The calls that the model's message makes, each with its id.

        The message is a dictionary or an object of the OpenAI client. Raises `InvalidRequestError` for arguments that
        are no JSON object.
        """
        try:
            calls = list(_calls(_mapping(message)))
        except InvalidRequestError:
            self._session.abandon_turn()
            raise
        self._session.end_turn([call for _, call in calls], store=current_policy().store is not False)
        return calls

    def run(self, call: ToolCall) -> Any:
        """What the tool returns for a call of the model. Raises what the tool raises, `KeyError` for no tool.

        Raises `InvalidRequestError` for arguments that do not fit, and for a tool that is to be awaited, by `arun`.
        """
        if inspect.iscoroutinefunction(self._known(call).function):
            raise InvalidRequestError(f"{call.name} is a coroutine function: run it by arun")
        return self._session.run(call, self._invoke)

    async def arun(self, call: ToolCall) -> Any:
        """`run` in an event loop; a tool that is no coroutine function runs in a thread."""
        self._known(call)
        return await self._session.arun(call, self._ainvoke)

    def _known(self, call: ToolCall) -> PythonTool[Any, Any]:
        if call.name not in self._tools:
            raise KeyError(f"there is no tool {call.name!r}")
        return self._tools[call.name]

    def _invoke(self, call: ToolCall) -> Any:
        return self._known(call).answer(call.arguments)

    def _start(self, call: ToolCall) -> Any:
        """Run early. Raises `TypeError` for a tool that has not run when it returns, and runs when it is called."""
        if inspect.iscoroutinefunction(self._known(call).function):
            raise TypeError(call.name)
        result = self._invoke(call)
        if inspect.isawaitable(result) or isinstance(result, Iterator | AsyncIterator):
            raise TypeError(call.name)
        return result

    async def _ainvoke(self, call: ToolCall) -> Any:
        if inspect.iscoroutinefunction(self._known(call).function):
            return await self._invoke(call)
        result = await asyncio.to_thread(self._in_thread, call)
        return await result if inspect.isawaitable(result) else result  # of a function around a coroutine function

    def _in_thread(self, call: ToolCall) -> Any:
        with self._session.changing(call):  # it goes on where `arun` is cancelled
            return self._invoke(call)

    def _hear(self, messages: Sequence[Any]) -> None:
        with kept_from_agent("following a session"):
            self._follow([_mapping(message) for message in messages])

    def _follow(self, messages: Sequence[Message]) -> None:
        if len(messages) < self._heard:  # the conversation was cut or replaced
            self._session.restart()
            self._heard = 0
        names = {id: call.name for message in messages for id, call in _calls(message, strict=False)}
        fresh, self._heard = messages[self._heard :], len(messages)
        for message in fresh:
            self._tell(message, names)

    def _tell(self, message: Message, names: Mapping[str, str]) -> None:
        role, text = message.get("role"), _text(message.get("content"))
        if role == "user":
            self._session.says(text)
        elif role == "tool":
            self._session.returns(names.get(str(message.get("tool_call_id")), ""), text)
        elif role == "assistant":
            self._session.recalls([call for _, call in _calls(message, strict=False)])
        else:
            self._session.reads(text)


@cache
def _of_process() -> ToolSpeculator:
    return ToolSpeculator()


@contextmanager
def agent_tools(
    tools: Sequence[PythonTool[Any, Any]],
    *,
    session: str,
    agent: str = "agent",
    tenant: str = "default",
    identity: str = "",
    store: bool = True,
    speculator: ToolSpeculator | None = None,
) -> Iterator[AgentTools]:
    """The tools of one session. Sessions with the same `speculator`, by default the process's, learn from each other.

    Which tools may run early is what `@tool` says, whatever the policy of the speculator. Raises `ConfigurationError`
    for two tools of one name, and for what is no tool.
    """
    for one in tools:
        if not isinstance(one, PythonTool):
            raise ConfigurationError(f"mark {getattr(one, '__name__', one)!r} with @agentspec.tool", param="tools")
    names = [one.name for one in tools]
    if len(set(names)) < len(names):
        raise ConfigurationError(f"two tools have one name: {', '.join(sorted(names))}", param="tools")
    policy = ToolPolicy(
        [one.name for one in tools if one.read_only],
        max_ages={one.name: one.max_age for one in tools if one.max_age is not None},
    )
    caller = AgentCaller(tenant, agent, session, identity, store)
    with ToolSession(speculator or _of_process(), caller, policy) as opened:
        yield AgentTools(tools, opened)


def _arguments(function: Callable[..., Any]) -> TypeAdapter[Any]:
    """Reads a function's arguments, and returns them as (args, kwargs). Raises `TypeError` for a function that a model
    cannot call.
    """
    if not callable(function) or not hasattr(function, "__name__"):
        raise TypeError(f"a tool is a function with a name, not {function!r}: write @agentspec.tool above its def")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"a tool returns its result, and {function.__name__} is a generator")
    for one in inspect.signature(function).parameters.values():
        if one.kind not in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY):
            raise TypeError(f"a tool takes named arguments, and {function.__name__} has {one}")

    def gathered(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs

    return TypeAdapter(cast("Any", wraps(function)(gathered)))  # with the function's signature


def _schema(arguments: TypeAdapter[Any]) -> dict[str, Any]:
    """The JSON schema of a function's parameters, with the definitions that it refers to."""
    schema = arguments.json_schema()
    found = {"type": "object", "properties": schema.get("properties", {}), "required": schema.get("required", [])}
    return found | ({"$defs": schema["$defs"]} if "$defs" in schema else {})


def _mapping(told: Any) -> Message:
    """A message, or a chunk of one, which the OpenAI client holds as an object."""
    return told if isinstance(told, Mapping) else cast("Message", told.model_dump())


def _calls(message: Message, *, strict: bool = True) -> Iterator[tuple[str, ToolCall]]:
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        try:
            arguments = json.loads(function.get("arguments") or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if isinstance(arguments, dict):
            yield str(call.get("id")), ToolCall(str(function.get("name")), arguments)
        elif strict:
            shown = str(function.get("arguments"))[:80]
            raise InvalidRequestError(
                f"the model called {function.get('name')} with arguments that are no JSON object: {shown!r};"
                " an answer that was cut off needs more max_tokens"
            )


def _text(content: Any) -> str:
    """The text of a message's content, which may come in parts."""
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)

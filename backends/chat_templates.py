"""Chat templates in general: tools described to those that know none, and marks that one model's text must not set."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from agentspec.errors import InvalidRequestError
from agentspec.protocol.validation import check_json

logger = logging.getLogger(__name__)

_TOOLS = """You may call functions to answer. They are, one JSON object a line:
<tools>
{tools}
</tools>
To call a function, answer with its name and arguments as JSON between these tags:
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument's name": "its value"}}}}
</tool_call>"""

# Markers that chat templates set around turns: one model's text must not open a turn in another model's prompt.
_TURN_MARKS = re.compile(r"<(?=[|\uff5c]|(?:start|end)_of_turn|bos>|eos>|/?s>)|\[(?=/?INST\])")
_LONGEST_MARK = len("<start_of_turn")


def described(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages for a template without tools: the system message describes the tools, calls and results are text."""
    texts = [_as_text(message) for message in messages]
    if not tools or not texts:
        return texts
    about = _TOOLS.format(tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools))
    if texts[0].get("role") == "system":
        return [{**texts[0], "content": f"{texts[0]['content']}\n\n{about}"}, *texts[1:]]
    return [{"role": "system", "content": about}, *texts]


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message.get('content', '')}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    objects = [{"name": call["function"]["name"], "arguments": call["function"]["arguments"]} for call in calls]
    written = [f"<tool_call>\n{json.dumps(one, ensure_ascii=False)}\n</tool_call>" for one in objects]
    content = "\n".join([*([message["content"]] if message["content"] else []), *written])
    return {"role": message["role"], "content": content}


def in_place(messages: list[dict[str, Any]], takes: Callable[[tuple[str, ...]], bool]) -> list[dict[str, Any]]:
    """The messages with each system and developer message where it stands, by a role that the template takes there:
    what was sent in front stays a beginning of the prompt. `takes` says whether it shows messages of some roles.
    """
    chat = ("user", "assistant")
    result: list[dict[str, Any]] = []
    for message in messages:
        role = message.get("role")
        if role == "developer" and not takes(("developer", *chat, "developer", "user")):
            role = "system"
        if role == "system" and all(one["role"] == "system" for one in result):
            if result and not takes(("system", "system", "user")):
                result[-1] = {**result[-1], "content": f"{result[-1]['content']}\n\n{message['content']}"}
                continue
        elif role == "system" and not takes(("system", *chat, "system", "user")):
            role = "user"
        result.append({**message, "role": role})
    return result


def simplified(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages for a template that refuses system messages, or two in a row of the user: one text of the user. Or
    it refuses a text next to thoughts and calls: then the text ends the thoughts.
    """
    result: list[dict[str, Any]] = []
    for message in messages:
        one = {**message, "role": "user"} if message.get("role") == "system" else message
        if one.get("tool_calls") and one.get("thinking") and one.get("content"):
            one = {**one, "thinking": f"{one['thinking']}\n\n{one['content']}", "content": ""}
        if result and one.get("role") == result[-1].get("role") == "user":
            result[-1] = {**result[-1], "content": f"{result[-1]['content']}\n\n{one['content']}"}
        else:
            result.append(one)
    return result


def escape_markers(text: str, behind: str = "") -> str:
    """`text` with a space inside every turn marker, so that no tokenizer reads it as one.

    With `behind`, the text that it will be appended to, a marker that begins there is not completed either.
    """
    escaped, end = _TURN_MARKS.sub(lambda mark: mark.group() + " ", text), behind[-_LONGEST_MARK:]
    begun = len(_TURN_MARKS.findall(end + escaped)) > len(_TURN_MARKS.findall(end))
    return " " + escaped if begun else escaped


def parsed_call(call: Any) -> dict[str, Any]:
    """A call with its arguments as an object. Raises `InvalidRequestError`."""
    function = call.get("function") if isinstance(call, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    try:
        parsed = _object(arguments) if isinstance(arguments, str) else arguments
    except RecursionError:
        parsed = None
    if not isinstance(function, Mapping) or not isinstance(parsed, dict) or not isinstance(function.get("name"), str):
        message = "a tool call in messages needs a function with a name and arguments that are a JSON object"
        raise InvalidRequestError(message, param="messages")
    check_json(parsed, "the arguments of a tool call", param="messages")
    return {**call, "function": {**function, "arguments": parsed}}


def _object(arguments: str) -> dict[str, Any]:
    """The JSON object in a call's arguments; an empty one if there is none, as in vLLM: a conversation in which a model
    once broke off could not go on otherwise, since templates take nothing else.
    """
    try:
        parsed = json.loads(arguments.strip() or "{}")
    except ValueError:
        parsed = None
    if isinstance(parsed, dict):
        return parsed
    logger.warning("a tool call in messages has arguments that are no JSON object: the model is shown none")
    return {}


def write_arguments(messages: list[dict[str, Any]], tokenizer: Any, source: str) -> None:
    """Turn the arguments of calls into JSON text where the chat template `source` prints them as they are."""
    if wants_json(tokenizer, source):
        for call in (call for one in messages for call in one.get("tool_calls", ())):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)


def _probe(tokenizer: Any, source: str, messages: list[dict[str, Any]]) -> str:
    """What the chat template `source` shows of the messages; empty if it refuses them."""
    try:
        return str(tokenizer.apply_chat_template(messages, chat_template=source, tokenize=False))
    except Exception:
        return ""


@lru_cache(maxsize=64)
def takes(tokenizer: Any, source: str, roles: tuple[str, ...]) -> bool:
    """Whether the chat template `source` shows messages of these `roles` in their order, each once."""
    texts = [f"probe{number}" for number in range(len(roles))]
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    return re.findall(r"probe\d", _probe(tokenizer, source, messages)) == texts


@lru_cache(maxsize=64)
def wants_json(tokenizer: Any, source: str) -> bool:
    """Whether the chat template `source` prints the arguments of calls as they are: then they have to be JSON text."""

    def shown(arguments: Any) -> str:
        call = {"id": "probe1234", "type": "function", "function": {"name": "f", "arguments": arguments}}
        asked, called = {"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}
        return _probe(tokenizer, source, [asked, called])

    return not re.search(r"probe5678(?!')", shown({"probe5678": 1})) and '"probe5678": 1' in shown('{"probe5678": 1}')

"""Gives messages and tools to chat templates in the form that they expect: plain text for templates without tools."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from agentspec.errors import InvalidRequestError
from agentspec.protocol.forms import check_json
from agentspec.types import Message

logger = logging.getLogger(__name__)

MAX_MESSAGES: Final = 10_000  # of a chat: a template may look at earlier messages for each of them
MAX_RENDERED: Final = 10_000_000  # characters of a prompt: more than the largest body of a request has by default

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


def rendered(
    apply: Callable[[list[dict[str, Any]], list[dict[str, Any]] | None], str],
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    arguments: Mapping[str, Any],
    *,
    knows_tools: bool,
) -> str:
    """What a chat template, called by `apply` with messages and tools, makes of them; `arguments` are checked only. A
    template that does not know tools has them described in the messages.

    Raises `InvalidRequestError` for messages that the template refuses, for too many, and for too long a prompt.
    """
    check_json(messages, "messages")
    check_json(tools, "tools")
    check_json(arguments, "chat_template_kwargs")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequestError(f"messages holds more than {MAX_MESSAGES:,} messages", param="messages")
    shown, listed = [plain(message) for message in messages], [dict(tool) for tool in tools]
    if not knows_tools:
        shown, listed = described(shown, listed), []
    try:
        text = apply(shown, listed or None)
    except Exception as error:  # whatever Python raises in a template, such as for a number divided by zero
        message = f"the chat template refuses these messages: {str(error)[:300] or type(error).__name__}"
        raise InvalidRequestError(message, param="messages") from error
    if len(text) > MAX_RENDERED:
        raise InvalidRequestError(f"the prompt is longer than {MAX_RENDERED:,} characters", param="messages")
    return text


def plain(message: Message) -> dict[str, Any]:
    """The message as templates expect it: text parts joined, the arguments of calls as objects instead of JSON text.

    Raises `InvalidRequestError` for content parts other than text, and for arguments that are neither a text nor an
    object within the bounds of `check_json`.
    """
    plain = dict(message)
    if message.get("tool_calls"):
        plain["tool_calls"] = [_parsed(call) for call in message["tool_calls"]]
    else:
        plain.pop("tool_calls", None)
    if "content" in message or "tool_calls" in plain:
        plain["content"] = _joined_parts(message.get("content"))
    return plain


def _joined_parts(content: Any) -> Any:
    if content is None:
        return ""
    if not isinstance(content, list):
        return content
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content]
    if any(not isinstance(text, str) for text in texts):
        raise InvalidRequestError("message content may hold text parts only", param="messages")
    return "".join(str(text) for text in texts)


def _parsed(call: Any) -> dict[str, Any]:
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


def escape_markers(text: str, behind: str = "") -> str:
    """`text` with a space inside every turn marker, so that no tokenizer reads it as one.

    With `behind`, the text that it will be appended to, a marker that begins there is not completed either.
    """
    escaped, end = _TURN_MARKS.sub(lambda mark: mark.group() + " ", text), behind[-_LONGEST_MARK:]
    begun = len(_TURN_MARKS.findall(end + escaped)) > len(_TURN_MARKS.findall(end))
    return " " + escaped if begun else escaped

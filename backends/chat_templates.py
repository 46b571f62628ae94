"""Chat templates in general: tools described to those that know none, and marks that one model's text must not set."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

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

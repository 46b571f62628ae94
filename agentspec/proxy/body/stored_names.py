"""Names of what an account stores at an upstream. Where several tenants share the account, none may use another's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from agentspec.errors import InvalidRequestError

_STORED = frozenset("file_id file_ids vector_store_ids vector_store_id uuid".split())  # `uuid`: media in vLLM's cache
_CONTAINERS = ("container", "container_id")
_LISTS = ("input", "messages", "tools")
_SCHEMAS = ("parameters", "schema", "input_schema")
_CITED = ("annotations", "citations")  # which file was read, sent back to who read it


def refuse_stored_names(fields: Mapping[str, Any]) -> None:
    """Raise `InvalidRequestError` for the name of a file, a store or a container at the upstream."""
    container = fields.get("container")
    if isinstance(container, dict) and (key := "id" if container.get("id") else _stored_name(container)) is not None:
        raise stored_elsewhere(f"container.{key}")
    if container and isinstance(container, str):
        raise stored_elsewhere("container")
    for name in _LISTS:
        for index, one in enumerate(objects(fields.get(name))):
            if (key := _stored_name(one)) is not None:
                raise stored_elsewhere(f"{name}[{index}].{key}")


def refuse_unowned_names(fields: Mapping[str, Any]) -> None:
    """Raise `InvalidRequestError` for a conversation, a prompt or an item that another tenant may have made there.

    Names of responses are allowed: the gateway knows their tenants. `refuse_stored_names` checks files and the like.
    """
    for name in ("conversation", "prompt"):
        if fields.get(name) is not None:
            raise stored_elsewhere(name)
    for index, item in enumerate(objects(fields.get("input"))):
        bare = not any(item.get(name) for name in ("type", "role", "content"))  # null is the same as nothing
        by_id = item.get("type") in ("reasoning", "image_generation_call") and bool(item.get("id"))
        by_id = by_id and not any(item.get(name) for name in ("encrypted_content", "content", "result"))
        if by_id or item.get("type") == "item_reference" or (bare and "id" in item):
            raise stored_elsewhere(f"input[{index}].id")


def objects(value: Any) -> list[dict[str, Any]]:
    return [one if isinstance(one, dict) else {} for one in value] if isinstance(value, list) else []


def stored_elsewhere(param: str) -> InvalidRequestError:
    message = (
        f"{param} names what is stored at the upstream, which several tenants of this gateway share; send the content"
    )
    return InvalidRequestError(message, param=param)


def _stored_name(value: dict[str, Any]) -> str | None:
    """The name in `value`, at any depth, under which something stored is named."""
    waiting: list[Any] = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            for key, given in one.items():
                if given and (key in _STORED or (key in _CONTAINERS and isinstance(given, str))):
                    return str(key)
            if one.get("skill_id") and one.get("type") != "anthropic":
                return "skill_id"
            if isinstance(audio := one.get("audio"), dict) and audio.get("id"):
                return "audio.id"
            waiting.extend(_parts(one))
        elif isinstance(one, list):
            waiting.extend(one)
    return None


def _parts(one: dict[str, Any]) -> Iterator[Any]:
    """The values in which something can be named: not in schemas and arguments of calls, nor in results of the
    upstream's own tools, which are sent back to it.
    """
    kind = str(one.get("type"))
    if kind.endswith("_tool_result"):
        return
    for key, given in one.items():
        if key not in (*_SCHEMAS, *_CITED) and not (key == "input" and kind.endswith("tool_use")):
            yield given

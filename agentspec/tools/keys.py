"""What must be equal for a result to be used: the tool, its schema, the arguments, and who asks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentspec.tools.policy import ToolSpec
from agentspec.tools.prediction.values import canonical

_DEEPEST = 16  # levels of nested objects whose defaults are filled


@dataclass(frozen=True, slots=True)
class AgentCaller:
    """Who an agent works for. `identity` tells apart the credentials with which its tools run, such as a user's id.

    Nothing is shared between tenants or identities. What is learned belongs to a tenant's `agent`. `branch` tells apart
    conversations of one session at the same time: what may change something in one voids what was read in all.
    """

    tenant: str = "default"
    agent: str = "agent"
    session: str = ""
    identity: str = ""
    branch: str = ""


def call_key(caller: AgentCaller, spec: ToolSpec, arguments: Mapping[str, Any]) -> str:
    """A hash, equal where the same call by the same caller is meant: arguments in any order, defaults left out or not.

    Raises `ValueError` or `TypeError` for arguments that JSON cannot hold, or would turn into others.
    """
    filled = with_defaults(dict(arguments), spec.schema)
    if json.loads(canonical(filled)) != filled:  # a tuple is no list, nor 1 as a key "1"
        raise ValueError("arguments that are no JSON")
    who = [caller.tenant, caller.identity, caller.session]
    what = [spec.name, canonical(spec.schema), canonical(filled)]
    return hashlib.sha256(canonical(who + what).encode("utf-8", "surrogatepass")).hexdigest()


def with_defaults(value: Any, schema: Any, depth: int = 0) -> Any:
    """An object with the defaults of its schema where it has no value, in nested objects too."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(value, dict) or not isinstance(properties, Mapping) or depth > _DEEPEST:
        return value
    filled = dict(value)
    for name, inner in properties.items():
        if name in filled:
            filled[name] = with_defaults(filled[name], inner, depth + 1)
        elif isinstance(inner, Mapping) and "default" in inner:
            filled[name] = inner["default"]
    return filled

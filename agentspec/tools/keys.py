"""What must be equal for a result to be used: the tool, its schema, the arguments, and who asks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentspec.tools.policy import ToolSpec
from agentspec.tools.prediction.values import canonical


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
    """A hash, the same for the same call by the same caller, whatever the order of the arguments.

    Raises `ValueError` or `TypeError` for arguments that JSON cannot hold, or would turn into others.
    """
    given = dict(arguments)
    if json.loads(canonical(given)) != given:  # a tuple is no list, nor 1 as a key "1"
        raise ValueError("arguments that are no JSON")
    who = [caller.tenant, caller.identity, caller.session]
    what = [spec.name, canonical(spec.schema), canonical(given)]
    return hashlib.sha256(canonical(who + what).encode("utf-8", "surrogatepass")).hexdigest()

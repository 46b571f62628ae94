"""Checks, before the first request, whether the models of a delegating strategy can play their roles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from agentspec.errors import AgentSpecError
from agentspec.reasoning.delegation.model_role import ModelRole
from agentspec.reasoning.delegation.thinking import Algorithm
from agentspec.reasoning.settings import DelegationSettings
from agentspec.reasoning.strategy import PROBE_SECONDS, answers
from agentspec.types import GenerateRequest, SamplingParams

_REFUSED = (400, 422)
_LONG = "One and one is two, and two and one is three. " * 4


async def prepare_roles(
    name: str, settings: DelegationSettings, roles: Mapping[str, ModelRole], algorithm: Algorithm
) -> list[str]:
    """The roles whose models do not answer. Raises `ConfigurationError` for a model that neither continues messages
    nor takes a prompt rendered here, and for a model that lacks what the algorithm needs.
    """
    answering: dict[int, bool] = {}
    for role, model in roles.items():
        if id(model) not in answering:  # a judge may be the base model
            answering[id(model)] = await _answers(model)
            if answering[id(model)]:
                await _examine(model, settings)
        if answering[id(model)]:
            algorithm.check_answering(name, settings, role, model)
    return [role for role, model in roles.items() if not answering[id(model)]]


async def _examine(model: ModelRole, settings: DelegationSettings) -> None:
    await model.check(settings.think_start)
    if model.continues_messages:
        await find_keeps_thinking(model, settings)


async def _answers(model: ModelRole) -> bool:
    """Whether the model answers messages or, with a template of ours, raw text: some models refuse messages."""
    if await answers(model.backend):
        return True
    return model.template is not None and await _completes(model)


async def _completes(model: ModelRole) -> bool:
    request = GenerateRequest(model.model, text="One", sampling=SamplingParams(max_tokens=1), store=False)
    try:
        return bool([delta async for delta in model.deltas(request, PROBE_SECONDS)])
    except AgentSpecError:
        return False


async def find_keeps_thinking(model: ModelRole, settings: DelegationSettings) -> None:
    """Find out, unless that is known, whether the endpoint's template keeps closed thinking in a message that the
    endpoint continues. It stays unknown where the endpoint does not answer; one that counts no tokens may not.

    Templates of reasoning models delete closed thinking: with the closing mark the prompt then gets shorter, or the
    endpoint refuses to continue what its template does not show.
    """
    start, end = settings.think_start, settings.think_end
    if model.keeps_thinking is not None or not end:
        return
    try:
        opened = await _prompt_tokens(model, f"{start}{_LONG}\n\nHello")
    except AgentSpecError:
        return
    try:
        closed = await _prompt_tokens(model, f"{start}{_LONG}\n{end}\n\nHello")
        model.keeps_thinking = 0 < opened <= closed
    except AgentSpecError as error:
        model.keeps_thinking = False if error.status in _REFUSED else None


async def _prompt_tokens(model: ModelRole, begun: str) -> int:
    messages = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": begun}]
    request = GenerateRequest(model.model, messages=messages, continue_final=True, store=False)
    request = replace(request, sampling=SamplingParams(max_tokens=1))
    counted = 0
    async for delta in model.deltas(request, PROBE_SECONDS):
        counted = delta.usage.prompt_tokens if delta.usage is not None else counted
    return counted

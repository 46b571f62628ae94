from __future__ import annotations

import importlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from inspect import iscoroutinefunction
from typing import Any, NoReturn

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from agentspec.backends.base import Capabilities
from agentspec.errors import ConfigurationError, InvalidRequestError
from agentspec.reasoning.delegation.backend import DelegationBackend
from agentspec.reasoning.settings import STRATEGIES, DelegationSettings, SpecReasonSettings, StrategySettings
from agentspec.reasoning.strategy import Dependencies, ModelRef, Strategy, prepare
from agentspec.testing import Script
from agentspec.types import Delta, GenerateRequest, Message
from tests.thinking_model import ThinkingModel

pytestmark = pytest.mark.anyio

MESSAGES = Capabilities(continue_final=True, logprobs=True)
ASK = GenerateRequest("fast", messages=[{"role": "user", "content": "Two?"}])


class Forgetful(ThinkingModel):
    """As the templates of some reasoning models: closed thinking is deleted from a message."""

    def prompt_text(self, request: GenerateRequest) -> str:
        head, _, rest = super().prompt_text(request).rpartition("<think>")
        return head + rest.rpartition("</think>")[2] if "</think>" in rest else head + "<think>" + rest


class Refusing(ThinkingModel):
    """As vLLM: what the template does not show as it is, is not continued."""

    def _respond(self, request: GenerateRequest) -> Script:
        closed = request.continue_final and "</think>" in self.prompt_text(request)
        return InvalidRequestError("cannot continue") if closed else super()._respond(request)


class Uncounted(ThinkingModel):
    """Reports no usage."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        async for delta in super().generate(request):
            yield replace(delta, usage=None)


def step(thinking: str) -> Script:
    return "one Answer: 4\n\n"


def strategy(base: ThinkingModel, small: ThinkingModel, **knobs: Any) -> DelegationBackend:
    settings = SpecReasonSettings(base="base", small="small", **knobs)
    return opened(settings, {"base": base, "small": small})


def opened(settings: SpecReasonSettings, models: Mapping[str, ThinkingModel]) -> DelegationBackend:
    def no_knowledge(name: str) -> NoReturn:
        raise AssertionError(name)

    return DelegationBackend.open(
        "fast", settings, Dependencies(lambda name: ModelRef(models[name], name), no_knowledge)
    )


@pytest.mark.parametrize(("kind", "keeps"), [(ThinkingModel, True), (Forgetful, False), (Uncounted, False)])
async def test_thinking_that_a_template_would_delete_stands_as_plain_text(
    kind: Callable[..., ThinkingModel], keeps: bool
) -> None:
    base, small = kind(step, capabilities=MESSAGES), kind(step, capabilities=MESSAGES)
    backend = strategy(base, small)
    await prepare(backend)
    assert backend.roles["base"].keeps_thinking is keeps
    async for _ in backend.generate(ASK):
        pass
    messages: Sequence[Message] = base.requests[-1].messages or ()
    assert messages[-1]["content"] == ("<think>\none Answer: 4\n</think>\n\n" if keeps else "one Answer: 4\n\n")


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("prepared", [True, False])
@pytest.mark.parametrize("kind", [Forgetful, Refusing])
@pytest.mark.parametrize("ids", [True, False])
async def test_what_a_template_does_with_thinking_is_found_out_when_it_is_needed(
    kind: Callable[..., ThinkingModel], prepared: bool, ids: bool
) -> None:
    """Also of an endpoint that did not answer at the start, and of one that is asked in messages for tools alone."""
    able = Capabilities(continue_final=True, logprobs=True, token_ids=ids)
    base = kind(step, capabilities=able)
    backend = strategy(base, ThinkingModel(step, capabilities=MESSAGES))
    if prepared:
        await prepare(backend)
    deltas = [delta async for delta in backend.generate(replace(ASK, tools=(TOOL,)))]
    assert deltas[-1].finish_reason == "stop" and backend.roles["base"].keeps_thinking is False
    assert (base.requests[-1].messages or ())[-1]["content"] == "one Answer: 4\n\n"
    asked = len(base.requests)
    async for _ in backend.generate(replace(ASK, tools=(TOOL,))):
        pass
    assert len(base.requests) == asked + 2  # a score and the answer: what was found out is not asked again


QWEN = """{%- for message in messages %}{%- set content = message.content %}{%- if message.role != 'assistant' %}
{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}{%- else %}
{%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
{{- '<|im_start|>assistant\n<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}
{{- content.split('</think>')[-1].lstrip('\n') + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"""


async def test_closed_thinking_stands_as_templates_write_it_anew() -> None:
    base = ThinkingModel(lambda thinking: "\none Answer: 4\n\n", capabilities=MESSAGES)
    async for _ in strategy(base, ThinkingModel(step, capabilities=MESSAGES), threshold=10).generate(ASK):
        pass
    chat = list(base.requests[-1].messages or ())
    (prompt,), _ = render_jinja_template([chat], chat_template=QWEN, continue_final_message=True)
    assert prompt.endswith("<think>\none Answer: 4\n</think>\n\n")


@pytest.mark.parametrize(("field", "given"), [("tools", [TOOL]), ("response_format", {"type": "json_object"})])
async def test_what_the_answering_model_cannot_be_asked_for_is_refused_before_the_thinking(
    field: str, given: Any
) -> None:
    base, small = ThinkingModel(step), ThinkingModel(step)
    with pytest.raises(InvalidRequestError, match=f"'base' continues no messages, which {field} needs") as refused:
        async for _ in strategy(base, small).generate(replace(ASK, extra={field: given})):
            pass
    assert refused.value.param == field and not base.requests and not small.requests


class Rewriting(ThinkingModel):
    """A chat template that shouts."""

    async def render(self, messages: Sequence[Message], *shown: Any) -> str:
        return (await super().render(messages, *shown)).upper()


async def test_a_template_that_changes_messages_is_refused() -> None:
    backend = strategy(Rewriting(step), ThinkingModel(step))
    with pytest.raises(ConfigurationError, match="name another model as base"):
        async for _ in backend.generate(ASK):
            pass
    with pytest.raises(ConfigurationError, match="name another model as base"):
        await prepare(strategy(Rewriting(step), ThinkingModel(step)))


async def test_thinking_that_the_prompt_has_begun_is_not_begun_again() -> None:
    class Begins(ThinkingModel):
        async def render(self, messages: Sequence[Message], *shown: Any) -> str:
            return await super().render(messages, *shown) + "<think>\n"

    base = Begins(step)
    async for _ in strategy(base, Begins(step)).generate(ASK):
        pass
    assert all(base.prompt_text(request).count("<think>\n") == 1 for request in base.requests)
    assert base.asked and base.asked[0].endswith("<|assistant|>\n<think>I think the quality score is: ")


async def test_a_judge_of_its_own_sees_the_thinking_and_decides() -> None:
    judge = ThinkingModel(step, score=lambda text: "2", capabilities=MESSAGES)
    base, small = ThinkingModel(lambda text: "base Answer: 4\n\n"), ThinkingModel(step)
    settings = SpecReasonSettings(base="base", small="small", judge="judge")
    models = {"base": base, "small": small, "judge": judge}
    backend = opened(settings, models)
    said = "".join([delta.extra.get("reasoning", "") async for delta in backend.generate(ASK)])
    assert said == "base Answer: 4\n\n" and base.asked == [] and len(judge.asked) == 1
    assert {request.model for request in judge.requests} == {"judge"}


async def test_requests_that_no_strategy_can_honour_are_refused() -> None:
    backend = strategy(ThinkingModel(step), ThinkingModel(step))
    begun = [{"role": "assistant", "content": "So"}]
    for request in (
        GenerateRequest("fast", text="two"),
        GenerateRequest("fast", messages=begun, continue_final=True),
        GenerateRequest("fast", messages=begun, extra={"n": 2}),
    ):
        with pytest.raises(InvalidRequestError, match=r"takes messages|not continue|without n"):
            async for _ in backend.generate(request):
                pass


@pytest.mark.parametrize("settings", STRATEGIES.values(), ids=STRATEGIES)
def test_every_listed_strategy_is_there(settings: type[StrategySettings]) -> None:
    module, _, kind = settings.implementation.partition(":")
    assert issubclass(getattr(importlib.import_module(module), kind), Strategy)
    if issubclass(settings, DelegationSettings):
        module, _, function = settings.algorithm.partition(":")
        assert iscoroutinefunction(getattr(importlib.import_module(module), function))

"""A model's text side, held to what the engine itself computes and stores."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentspec.backends.torch.text.model_text import ModelText, ids_of_end
from agentspec.backends.torch.text.tokenizer import TokenizerAdapter
from agentspec.errors import InvalidRequestError, ModelUnavailableError

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello there"}]
ANSWER = {"role": "assistant", "content": "General Kenobi"}


@pytest.fixture(scope="module")
def text(default_model: Any) -> ModelText:
    return ModelText.load(str(default_model.folder))


@pytest.mark.model
def test_a_call_is_what_the_engine_sees_and_makes(text: ModelText) -> None:
    prompt, answer = text.encode(MESSAGES, ANSWER)
    assert prompt == text.tokenizer.encode_chat(MESSAGES)
    assert answer[:-1] == text.tokenizer.encode("General Kenobi") and answer[-1] in text.end_ids
    assert text.tokenizer.spell(answer[-1]) == "<|im_end|>"
    assert text.encode(MESSAGES, ANSWER, finished=False)[1] == answer[:-1]


@pytest.mark.model
def test_plain_prompts_and_answers_by_themselves(text: ModelText) -> None:
    prompt, answer = text.encode([], ANSWER, prompt="Once upon")
    assert (
        prompt == text.tokenizer.encode("Once upon", special=True) and text.tokenizer.decode(answer) == "General Kenobi"
    )
    assert text.encode([], ANSWER) == ([], answer) and answer[-1] in text.end_ids


@pytest.mark.slow
@pytest.mark.model
def test_namespaces_are_the_engines(default_model: Any, text: ModelText) -> None:
    from agentspec.backends.settings import TorchSettings
    from agentspec.backends.torch.loader import load

    loaded = load(TorchSettings(model=str(default_model.folder)))
    assert loaded.namespace("t") == text.namespace("t")
    assert ids_of_end(loaded.target.module.generation_config, loaded.tokenizer) == text.end_ids


@pytest.mark.model
@pytest.mark.parametrize("content", [None, "", [{"type": "image_url"}]])
def test_an_answer_without_text_is_refused(text: ModelText, content: Any) -> None:
    with pytest.raises(InvalidRequestError):
        text.encode([], {"role": "assistant", "content": content})


def test_a_template_that_rewrites_the_past_is_not_read_off() -> None:
    class Tokenizer:
        """Characters; an answer that is not the last message loses its thoughts, and so does a whole conversation."""

        chat_template = "x"
        eos_token_id = 0

        def apply_chat_template(self, messages: Any, add_generation_prompt: bool, **_: Any) -> str:
            return ("<open>" if add_generation_prompt else "") + "|".join(m["content"] for m in messages)

        def encode(self, text: str, **_: Any) -> list[int]:
            return [ord(c) for c in text]

    text = ModelText(TokenizerAdapter(Tokenizer()), "", "", "", frozenset({0}))
    prompt, answer = text.encode([{"role": "user", "content": "q"}], {"role": "assistant", "content": "a"})
    assert ("".join(map(chr, prompt)), answer) == ("<open>q", [ord("a"), 0])


def test_the_ids_that_end_an_answer() -> None:
    tokenizer = SimpleNamespace(eos_token_id=2)
    assert ids_of_end(SimpleNamespace(eos_token_id=[1, 2]), tokenizer) == {1, 2}
    assert ids_of_end(SimpleNamespace(eos_token_id=None), tokenizer) == {2}
    assert ids_of_end(None, SimpleNamespace()) == frozenset()


def test_a_folder_that_holds_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelUnavailableError):
        ModelText.load(str(tmp_path))

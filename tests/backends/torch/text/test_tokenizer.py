"""Prompts in, text out; what a chat template refuses is the caller's mistake."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.backends.torch.text import tokenizer
from agentspec.backends.torch.text.tokenizer import TokenizerAdapter
from agentspec.errors import ContextLengthError, InvalidRequestError
from agentspec.types import GenerateRequest

USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def codec(lab: Any) -> TokenizerAdapter:
    return lab.tokenizer


class SlowTokenizer:
    """A tokenizer without a native half."""

    chat_template = None

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [1] * add_special_tokens + list(text.encode())

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return bytes(i for i in ids if i != 1 or not skip_special_tokens).decode()


def test_messages_go_through_the_template(codec: TokenizerAdapter) -> None:
    ids = codec.encode_chat([USER, {"role": "assistant", "content": "yo"}, USER])
    assert ids == [257, *codec.encode("hi"), 258, *codec.encode("yo"), 257, *codec.encode("hi"), 258]


def test_continue_final_leaves_the_last_message_open(codec: TokenizerAdapter) -> None:
    ids = codec.encode_chat([USER, {"role": "assistant", "content": "So far"}], continue_final=True)
    assert ids == [257, *codec.encode("hi"), 258, *codec.encode("So far")]


def test_text_parts_are_joined(codec: TokenizerAdapter) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert codec.encode_chat([{"role": "user", "content": parts}]) == codec.encode_chat([USER])


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "martian", "content": "hi"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
        [{"role": "user", "content": ["hi"]}],
        [{"role": "user", "content": [{"type": "text", "text": None}]}],
        [{"content": "hi"}],
    ],
)
def test_refused_messages_name_the_field(codec: TokenizerAdapter, messages: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        codec.encode_chat(messages)
    assert caught.value.param == "messages"


def test_a_model_without_a_template_says_what_to_do() -> None:
    with pytest.raises(InvalidRequestError, match="completions"):
        TokenizerAdapter(SlowTokenizer()).encode_chat([USER])


def test_the_prompt_is_whichever_was_given(codec: TokenizerAdapter) -> None:
    assert codec.prompt(GenerateRequest("m", token_ids=(1, 2))) == [1, 2]
    assert codec.prompt(GenerateRequest("m", text="ab")) == codec.encode("ab", special=True)
    assert codec.prompt(GenerateRequest("m", messages=[USER])) == codec.encode_chat([USER])


def test_special_tokens_are_spelled_but_not_decoded(codec: TokenizerAdapter) -> None:
    assert codec.decode([*codec.encode("a"), 256]) == "a"
    assert codec.spell(256) == "<|end|>"


def test_a_tokenizer_without_a_native_half_works() -> None:
    slow = TokenizerAdapter(SlowTokenizer())
    assert slow.encode("a", special=True) == [1, 97]
    assert slow.decode([1, 97]) == "a" and slow.spell(98) == "b"


def test_truncation_in_the_tokenizers_file_is_ignored(lab: Any) -> None:
    import copy

    tokenizer = copy.deepcopy(lab.loaded.tokenizer)
    tokenizer.backend_tokenizer.enable_truncation(3)
    assert len(TokenizerAdapter(tokenizer).encode("abcdef")) == 6


def test_several_threads_may_encode_and_decode(codec: TokenizerAdapter) -> None:
    texts = [f"text number {n} " * 50 for n in range(200)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda text: codec.decode(codec.encode(text)), texts)) == texts


@given(
    st.text(st.sampled_from("ab é\N{GRINNING FACE}<|>\n") | st.characters(codec="utf-8"), max_size=40), st.booleans()
)
def test_long_texts_are_encoded_like_short_ones(codec: TokenizerAdapter, text: str, special: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        ids = codec.encode(text, special=special)
        patch.setattr(tokenizer, "LONG_TEXT", 0)
        assert codec.encode(text, special=special) == ids
        assert codec.fewest_tokens(text) <= len(ids)


@pytest.mark.parametrize("length", [0, tokenizer.LONG_TEXT])
def test_half_a_surrogate_pair_is_refused(codec: TokenizerAdapter, length: int) -> None:
    with pytest.raises(InvalidRequestError, match="half a surrogate pair"):
        codec.encode("a" * length + "\ud83d")


def test_a_text_that_cannot_fit_is_refused_unread(codec: TokenizerAdapter) -> None:
    text = "no room " * 1_000_000
    assert codec.fewest_tokens(text) > 1000
    with pytest.raises(ContextLengthError, match="at least") as caught:
        codec.read(GenerateRequest("m", text=text), 1000)
    assert caught.value.param == "prompt"
    with pytest.raises(ContextLengthError) as caught:
        codec.read(GenerateRequest("m", messages=[{"role": "user", "content": text}]), 1000)
    assert caught.value.param == "messages"

"""Text as it arrives, joined, is the text of the whole."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from agentspec.text.detokenizer import Detokenizer

TEXTS = st.text(alphabet=st.sampled_from("ab é€😀\n�"), max_size=30)


def decode_bytes(tokens: Sequence[int]) -> str:
    """A byte tokenizer: token i is byte i; ids above 255 are special and skipped."""
    return bytes(token for token in tokens if token < 256).decode(errors="replace")


def pieces(tokens: Sequence[int], prompt: Sequence[int] = ()) -> list[str]:
    detokenizer = Detokenizer(decode_bytes, prompt)
    return [*(detokenizer.feed(token) for token in tokens), detokenizer.finish()]


@given(TEXTS)
def test_joined_pieces_are_the_text_and_each_is_whole_characters(text: str) -> None:
    parts = pieces(list(text.encode()))
    assert "".join(parts) == text
    assert all(part == "" or part in text for part in parts)


@given(st.lists(st.integers(0, 300), max_size=30))
def test_any_bytes_whatsoever(tokens: list[int]) -> None:
    assert "".join(pieces(tokens)) == decode_bytes(tokens)


@given(TEXTS, TEXTS)
def test_the_prompt_is_not_repeated(prompt: str, text: str) -> None:
    assert "".join(pieces(list(text.encode()), list(prompt.encode()))) == text


def test_a_character_begun_in_the_prompt_is_completed() -> None:
    assert "".join(pieces([0x82, 0xAC, 0x61], [0x61, 0xE2])) == "€a"
    assert "".join(pieces([0x82, 0xAC, 0x61], [0xAC, 0xAC, 0xE2])) == "€a"  # the prompt's other errors stay there


def test_words_keep_their_leading_space_as_in_context() -> None:
    words = ["▁in", "▁the", "▁end", "s"]

    def decode(tokens: Sequence[int]) -> str:
        return "".join(words[token] for token in tokens).replace("▁", " ").removeprefix(" ")

    detokenizer = Detokenizer(decode, [0])
    assert [detokenizer.feed(token) for token in (1, 2, 3)] == [" the", " end", "s"]
    assert [Detokenizer(decode).feed(1)] == ["the"]

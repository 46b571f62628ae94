from __future__ import annotations

from pathlib import Path

import pytest

from agentspec.cache import SuffixCache
from agentspec.cache.deletion import Decode
from agentspec.errors import ConfigurationError

KEY = r"sk-[a-z0-9]{8}"


def decode(ids: object) -> str:
    return "".join(map(chr, ids))  # type: ignore[call-overload]


def encode(text: str) -> list[int]:
    return [ord(character) for character in text]


def say(cache: SuffixCache, prompt: str, output: str, decode: Decode | None = decode) -> None:
    with cache.request(encode(prompt), session="s", decode=decode) as request:
        request.extend(encode(output))


def drafted(cache: SuffixCache, text: str, session: str) -> str:
    with cache.request(encode(text), session=session, store=False) as request:
        draft = request.draft(max_tokens=1)
        return decode(draft.tokens.tolist())


def test_a_secret_stays_in_its_own_session(tmp_path: Path) -> None:
    with SuffixCache.open(tmp_path, refuse_patterns=[KEY, "never this"]) as cache:
        say(cache, "the key: ", "sk-12345678 of course")
        assert (cache.stats().refused, cache.stats().sequences) == (1, 0)
        assert drafted(cache, "the key: sk-12345678 of course. again: sk-", "s") == "1"
        assert drafted(cache, "sk-", "other") == ""
        say(cache, "anything", "harmless")
        assert (cache.stats().refused, cache.stats().sequences) == (1, 1)
        assert drafted(cache, "ha", "other") == "r"
    with SuffixCache.open(tmp_path) as cache:
        assert cache.stats().sequences == 1


def test_the_end_of_the_prompt_is_kept_and_so_looked_at() -> None:
    with SuffixCache.open(refuse_patterns=[KEY]) as cache:
        say(cache, "my key is sk-12345678", "thank you")
        say(cache, "my key is sk-1234", "5678")  # across
        say(cache, "my key is sk-12345678" + 64 * ".", "thank you")
        assert (cache.stats().refused, cache.stats().sequences) == (2, 1)


def test_what_nobody_can_read_is_refused() -> None:
    with SuffixCache.open(refuse_patterns=[KEY]) as cache:
        say(cache, "a", "harmless", decode=None)
        assert (cache.stats().refused, cache.stats().sequences) == (1, 0)


def test_an_invalid_pattern() -> None:
    with pytest.raises(ConfigurationError, match=r"refuse_patterns.*'\(open'") as caught:
        SuffixCache.open(refuse_patterns=["fine", "(open"])
    assert caught.value.param == "refuse_patterns"
    with pytest.raises(ConfigurationError, match=r"refuse_patterns.*b'key'"):
        SuffixCache.open(refuse_patterns=[b"key"])  # type: ignore[list-item]  # matches no text

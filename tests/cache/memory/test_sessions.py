from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from agentspec.cache.memory.sessions import TRANSCRIPT, Session, Sessions
from agentspec.cache.tokens import Tokens

MOST = 1 << 20


def tokens(*ids: int) -> Tokens:
    return np.array(ids, dtype=np.int32)


def text(seed: int, length: int) -> Tokens:
    return np.random.default_rng(seed).integers(0, 1000, length).astype(np.int32)


def opened(sessions: Sessions, name: str | None, prompt: Tokens) -> Session:
    session = sessions.acquire(name, prompt)
    session.begin(prompt, MOST)
    return session


def test_a_prompt_that_goes_on_adds_the_difference() -> None:
    sessions = Sessions()
    first = opened(sessions, "s", text(0, 500))
    index = first.index
    sessions.release(first)
    longer = np.concatenate((text(0, 500), text(1, 20)))
    second = opened(sessions, "s", longer)
    assert second is first and second.index is index
    assert index.tokens(TRANSCRIPT).tolist() == longer.tolist()


def test_an_edited_history_replaces_what_follows() -> None:
    session = Session("s")
    session.begin(text(0, 500), MOST)
    edited = np.concatenate((text(0, 400), text(2, 300)))
    session.begin(edited, MOST)
    assert session.index.tokens(TRANSCRIPT).tolist() == edited.tolist()
    session.begin(text(3, 100), MOST)
    assert session.index.tokens(TRANSCRIPT).tolist() == text(3, 100).tolist()
    session.begin(tokens(), MOST)
    assert session.index.length(TRANSCRIPT) == 0
    session.index.check_integrity()


def test_only_the_end_of_an_outsized_prompt_is_remembered() -> None:
    session = Session("s")
    session.begin(text(0, 500), 100)
    assert session.index.tokens(TRANSCRIPT).tolist() == text(0, 500)[-100:].tolist()


def test_without_a_name_the_continued_session_is_found() -> None:
    """Two conversations share a long system prompt; each goes on in its own."""
    sessions, system = Sessions(), text(0, 300)
    pair = [np.concatenate((system, text(seed, 60))) for seed in (1, 2)]
    begun = [opened(sessions, None, prompt) for prompt in pair]
    for session in begun:
        sessions.release(session)
    for prompt, session in zip(pair, begun, strict=True):
        following = np.concatenate((prompt, text(9, 10)))
        found = opened(sessions, None, following)
        assert found is session
        sessions.release(found)
    stranger = opened(sessions, None, np.concatenate((system, text(3, 60))))
    assert stranger not in begun
    assert len(sessions) == 3


def test_a_session_in_use_is_not_shared() -> None:
    sessions = Sessions()
    first = opened(sessions, "s", tokens(1, 2, 3))
    second = opened(sessions, "s", tokens(1, 2, 3))
    assert second is not first and second.name is None
    sessions.release(first)
    assert sessions.acquire("s", tokens(1, 2, 3)) is first


def test_the_least_recently_used_idle_session_goes_first() -> None:
    sessions = Sessions()
    for name in "abc":
        session = opened(sessions, name, text(0, 100))
        if name != "a":
            sessions.release(session)
    sessions.release(opened(sessions, "b", text(0, 100)))
    measured = sessions.memory_bytes
    assert sessions.evict()
    assert [session.name for session in sessions] == ["a", "b"]
    assert 0 < sessions.memory_bytes < measured
    assert sessions.evict()
    assert not sessions.evict()  # "a" is in use
    busy = next(iter(sessions))
    sessions.release(busy)
    assert sessions.evict()
    assert (len(sessions), sessions.memory_bytes) == (0, 0)


PROMPT = st.builds(lambda at, end: [*range(at), *range(50, end)], st.sampled_from([0, 4, 12, 24]), st.integers(50, 60))


@example([("begin", [1, 2, 3], None), ("release", [], None), ("begin", [1, 2, 3, 4, 5], None), ("release", [], None)])
@given(st.lists(st.tuples(st.sampled_from(["begin", "begin", "release", "forget"]), PROMPT, st.none() | st.just("s"))))
def test_a_prompt_finds_whichever_idle_session_it_continues_furthest(
    actions: list[tuple[str, list[int], str | None]],
) -> None:
    sessions = Sessions()
    held: list[Session] = []
    for action, prompt, name in actions:
        if action == "begin":
            best = max((one.continued_by(tokens(*prompt)) for one in sessions if not one.busy), default=0)
            session = sessions.acquire(name, tokens(*prompt))
            if name is None and prompt:
                assert (session.continued_by(tokens(*prompt)) if session.index.sequence_count else 0) == best
            session.begin(tokens(*prompt), MOST)
            held.append(session)
        elif held:
            getattr(sessions, action)(held.pop(len(prompt) % len(held)))
    for session in held:
        sessions.release(session)
    while sessions.evict():
        pass
    assert (len(sessions), sessions.busy, sessions.memory_bytes, sessions._idle) == (0, 0, 0, {})


def test_a_session_that_was_never_begun_is_not_looked_at() -> None:
    sessions = Sessions()
    sessions.release(sessions.acquire(None, tokens(1)))
    assert not sessions.acquire(None, tokens(1)).index.sequence_count

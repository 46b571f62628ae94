from __future__ import annotations

import threading

import pytest

from agentspec.backends.torch.threads import on_own_thread


def test_the_result_comes_back_and_the_thread_is_gone() -> None:
    thread = on_own_thread(threading.current_thread)
    assert thread is not threading.current_thread()
    assert not thread.is_alive()


def test_what_it_raises_is_raised_here() -> None:
    with pytest.raises(KeyError, match="lost"):
        on_own_thread(lambda: {}["lost"])

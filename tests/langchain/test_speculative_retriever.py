from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda
from langchain_tests.integration_tests import RetrieversIntegrationTests
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from pydantic import Field

import agentspec
from agentspec.errors import ConfigurationError
from agentspec.langchain import Correction, SpeculativeRetriever
from agentspec.langchain.document_cache import MAX_SCOPES, DocumentCaches, copies, key_of

pytestmark = pytest.mark.anyio

CORPUS = ["the cat purrs", "the dog barks", "a river flows", "the cat sleeps", "dogs and cats", "a stone"]
DOCUMENTS = [Document(id=str(at), page_content=text) for at, text in enumerate(CORPUS)]


def is_set() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


class Scripted(BaseRetriever):
    """Finds documents by the number of shared words; slowly, or not at all, if told so. Notes what it is asked."""

    asked: list[str] = Field(default_factory=list)
    batches: list[int] = Field(default_factory=list)
    documents: list[Document] = Field(default_factory=lambda: list(DOCUMENTS))
    delay: float = 0.0
    go: Any = Field(default_factory=is_set)  # cleared, it holds back what is asked for from threads
    failing: set[str] = Field(default_factory=set)

    def found(self, query: str) -> list[Document]:
        self.asked.append(query)
        if query in self.failing:
            raise OSError("down")
        words = set(query.split())
        return sorted(self.documents, key=lambda one: (-len(words & set(one.page_content.split())), str(one.id)))[:4]

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        time.sleep(self.delay)
        assert self.go.wait(60)
        return self.found(query)

    async def _aget_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        await asyncio.sleep(self.delay)
        return self.found(query)

    async def abatch(self, inputs: list[str], *args: Any, **kwargs: Any) -> list[list[Document]]:
        self.batches.append(len(inputs))
        return await super().abatch(inputs, *args, **kwargs)


def around(inner: Scripted | None = None, **options: Any) -> tuple[SpeculativeRetriever, Scripted]:
    inner = inner or Scripted()
    return SpeculativeRetriever(retriever=inner, **options), inner


class TestStandard(RetrieversIntegrationTests):
    @property
    def retriever_constructor(self) -> type[SpeculativeRetriever]:
        return SpeculativeRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {"retriever": Scripted()}

    @property
    def retriever_query_example(self) -> str:
        return "the cat"


class TestStandardWithCorrections(TestStandard):
    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {"retriever": Scripted(), "mode": "correct", "scope": "retriever"}


def test_exact_always_asks_and_answers_as_the_retriever_does():
    retriever, inner = around(scope="retriever")
    assert retriever.invoke("the cat") == retriever.invoke("the cat") == inner.found("the cat")
    inner.documents = DOCUMENTS[::2]
    assert retriever.invoke("the cat") == inner.found("the cat")
    assert retriever.stats.guesses == 0 and retriever.stats.calls == 3


async def test_equal_questions_under_way_share_an_answer_and_different_ones_a_batch():
    retriever, inner = around(Scripted(delay=0.05), scope="retriever")
    answers = await asyncio.gather(*(retriever.ainvoke(query) for query in ("cat", "dog", "cat", "river")))
    assert answers == [inner.found(query) for query in ("cat", "dog", "cat", "river")]
    assert (sorted(inner.asked[:3]), inner.batches, retriever.stats.joined) == (["cat", "dog", "river"], [3], 1)
    await retriever.ainvoke("cat")
    assert retriever.stats.joined == 1


def ask_together(retriever, inner, ask, threads):
    """Call `ask` in threads; `inner` answers once all but the first wait for it."""
    started = [threading.Thread(target=ask) for _ in range(threads)]
    for thread in started:
        thread.start()
    while retriever.stats.joined < threads - 1:
        time.sleep(0.005)
    inner.go.set()
    for thread in started:
        thread.join()


def test_equal_questions_in_threads_share_an_answer():
    retriever, inner = around(scope="retriever")
    inner.go.clear()
    ask_together(retriever, inner, lambda: retriever.invoke("cat"), 4)
    assert inner.asked == ["cat"]


async def test_a_failure_reaches_those_who_asked_and_nobody_else():
    retriever, inner = around(Scripted(failing={"dog"}), scope="retriever")
    found = await asyncio.gather(*(retriever.ainvoke(query) for query in ("cat", "dog", "dog")), return_exceptions=True)
    assert found[0] == inner.found("cat") and [type(one) for one in found[1:]] == [OSError, OSError]
    with pytest.raises(OSError, match="down"):
        retriever.invoke("dog")
    inner.failing.clear()
    assert retriever.invoke("dog") == await retriever.ainvoke("dog") == inner.found("dog")


async def test_one_who_gives_up_takes_nobody_along():
    retriever, inner = around(Scripted(delay=0.05), scope="retriever")
    first, second = (asyncio.ensure_future(retriever.ainvoke("cat")) for _ in range(2))
    await asyncio.sleep(0.01)
    first.cancel()
    assert await second == inner.found("cat")


def test_what_was_fetched_ahead_is_handed_out_once():
    retriever, inner = around(k=2)
    with retriever.request():
        retriever.prefetch(["cat", "dog"])
        retriever.settle()
        assert sorted(inner.asked) == ["cat", "dog"]
        assert retriever.invoke("cat") == inner.found("cat")[:2]
        asked = len(inner.asked)
        retriever.invoke("cat")
        assert len(inner.asked) == asked + 1
    with pytest.raises(ConfigurationError, match="needs a request"):
        retriever.prefetch(["cat"])


async def test_fetching_ahead_in_the_loop_and_failing_at_it():
    retriever, inner = around(Scripted(failing={"dog"}), scope="retriever")
    await retriever.aprefetch(["cat", "dog"])
    inner.failing.clear()
    assert await retriever.ainvoke("cat") == inner.found("cat")
    assert await retriever.ainvoke("dog") == inner.found("dog")
    assert inner.asked == ["cat", "dog", "cat", "dog", "dog"]


def test_a_guess_comes_at_once_and_a_wrong_one_is_corrected():
    told: list[Correction] = []
    retriever, inner = around(mode="correct", scope="retriever", k=1, on_correction=told.append)
    assert retriever.invoke("cat sleeps") == [DOCUMENTS[3]]
    inner.go.clear()
    assert retriever.invoke("sleeps") == [DOCUMENTS[3]]
    assert retriever.invoke("a stone") != [DOCUMENTS[5]]
    inner.go.set()
    (correction,) = retriever.settle()
    assert told == [correction] and correction.query == "a stone" and correction.documents == [DOCUMENTS[5]]
    assert retriever.invoke("a stone") == [DOCUMENTS[5]]
    assert retriever.settle() == retriever.corrections() == []
    stats = retriever.stats
    assert (stats.calls, stats.guesses, stats.confirmed, stats.corrected) == (4, 3, 2, 1)


async def test_corrections_in_the_loop_and_of_a_retriever_that_fails():
    retriever, inner = around(mode="correct", scope="retriever", k=2)
    assert await retriever.ainvoke("the cat") == inner.found("the cat")[:2]
    inner.failing = {"the dog"}
    guess = await retriever.ainvoke("the dog")
    assert len(guess) == 2
    (correction,) = await retriever.asettle()
    assert isinstance(correction.error, OSError) and correction.documents == () and correction.guess == guess
    assert not hasattr(correction, "__dict__")


def test_an_own_score_ranks_what_is_remembered():
    longest = lambda query, documents: [len(one.page_content) for one in documents]  # noqa: E731
    retriever, inner = around(mode="correct", scope="retriever", k=1, score=longest)
    seen = inner.found("the cat")
    retriever.invoke("the cat")
    assert retriever.invoke("anything") == [max(seen, key=lambda one: len(one.page_content))]
    retriever.settle()


async def test_going_ahead_gives_the_result_of_the_true_documents():
    retriever, inner = around(Scripted(delay=0.05), scope="retriever", k=1)
    begun: list[str] = []
    cancelled: list[str] = []
    before: list[int] = []

    async def answer(documents: list[Document]) -> str:
        text = documents[0].page_content
        begun.append(text)
        before.append(len(inner.asked))
        try:
            await asyncio.sleep(0.08)
        except asyncio.CancelledError:
            cancelled.append(text)
            raise
        return text

    assert await retriever.ahead("the cat sleeps", answer) == "the cat sleeps"
    assert await retriever.ahead("cat sleeps", answer) == "the cat sleeps"
    assert before == [1, 1]  # the second answer began before the retriever had been asked again, and was the right one
    assert await retriever.ahead("a stone", answer) == "a stone"
    assert begun[2:] == [begun[2], "a stone"] and cancelled == [begun[2]]
    inner.failing = {"dogs"}
    with pytest.raises(OSError, match="down"):
        await retriever.ahead("dogs", answer)
    assert retriever.stats.confirmed == retriever.stats.corrected == 1


async def test_a_continuation_that_fails_on_a_guess_counts_only_if_the_guess_was_right():
    retriever, _ = around(Scripted(delay=0.02), scope="retriever", k=1)
    await retriever.ainvoke("the cat sleeps")

    async def picky(documents: list[Document]) -> str:
        if documents[0].id == "3":
            raise ValueError("not that one")
        return documents[0].page_content

    assert await retriever.ahead("a stone", picky) == "a stone"
    with pytest.raises(ValueError, match="not that one"):
        await retriever.ahead("the cat sleeps", picky)


@pytest.mark.parametrize("mode", ["exact", "correct"])
async def test_documents_may_be_changed_by_whoever_gets_them(mode):
    retriever, inner = around(Scripted(delay=0.02), mode=mode, scope="retriever", k=1)
    inner.documents = [one.model_copy(deep=True) for one in DOCUMENTS]
    for _ in range(3):
        for (document,) in await asyncio.gather(*(retriever.ainvoke("cat sleeps") for _ in range(2))):
            assert document.metadata == {}
            document.metadata["seen"] = True
        inner.documents = [one.model_copy(deep=True) for one in DOCUMENTS]
    assert await retriever.asettle() == []


class Noting(threading.Event):
    owner: threading.Thread | None = None

    def wait(self, timeout: float | None = None) -> bool:
        self.owner = threading.current_thread()
        return super().wait(timeout)


def test_documents_may_be_changed_while_another_thread_waits_for_them(monkeypatch):
    retriever, inner = around(Scripted(go=Noting()), scope="retriever")
    inner.documents = [one.model_copy(deep=True) for one in DOCUMENTS]
    changed, seen = threading.Event(), []

    def late(documents):
        assert threading.current_thread() is inner.go.owner or changed.wait(60)
        return copies(documents)

    def ask():
        for document in retriever.invoke("cat"):
            seen.append(dict(document.metadata))
            document.metadata["seen"] = True
        changed.set()

    monkeypatch.setattr("agentspec.langchain.request_coalescer.copies", late)
    ask_together(retriever, inner, ask, 2)
    assert seen == [{}] * 8


async def test_a_callback_that_fails_is_logged_and_stops_nothing(caplog):
    def fail(correction: Correction) -> None:
        raise ValueError("mine")

    retriever, _ = around(mode="correct", scope="retriever", k=1, on_correction=fail)
    await retriever.ainvoke("the cat")
    await retriever.ainvoke("a stone")
    assert [one.query for one in await retriever.asettle()] == ["a stone"]
    assert "on_correction failed: ValueError at" in caplog.text and "mine" not in caplog.text


def guessed(retriever: SpeculativeRetriever) -> int:
    retriever.settle()
    return retriever.stats.guesses


def test_a_request_shares_nothing_with_another():
    retriever, _ = around(mode="correct")
    retriever.invoke("cat")
    retriever.invoke("cat")
    assert guessed(retriever) == 0
    for before in (0, 1):
        with retriever.request():
            retriever.invoke("cat")
            assert guessed(retriever) == before
            retriever.invoke("cat")
    assert guessed(retriever) == 2
    assert retriever._caches.characters == 0


def test_the_calls_of_one_run_are_a_request():
    retriever, _ = around(mode="correct")
    chain = RunnableLambda(lambda query: [retriever.invoke(query), retriever.invoke(query)])
    for expected in (1, 2):
        first, second = chain.invoke("the cat")
        assert first == second and guessed(retriever) == expected


def graph_of(retriever: SpeculativeRetriever) -> Any:
    builder = StateGraph(dict)
    builder.add_node("look", lambda state: {"found": retriever.invoke(state["query"])})
    builder.add_edge(START, "look")
    builder.add_edge("look", END)
    return builder.compile(checkpointer=InMemorySaver())


def test_a_session_is_a_graphs_thread_or_a_workflows():
    retriever, _ = around(mode="correct", scope="session")
    graph = graph_of(retriever)
    for thread, expected in (("1", 0), ("1", 1), ("2", 1), ("1", 2)):
        graph.invoke({"query": "cat"}, {"configurable": {"thread_id": thread}})
        assert guessed(retriever) == expected
    for session, expected in (("3", 2), ("3", 3), ("4", 3)):
        with agentspec.workflow("w", session=session):
            retriever.invoke("cat")
        assert guessed(retriever) == expected
    retriever.invoke("cat")
    assert guessed(retriever) == 3


def test_memory_is_bound_and_the_oldest_goes_first():
    caches = DocumentCaches(max_characters=100)
    for scope in range(5):
        caches.learn(scope, "query", [Document(page_content="x" * 40)])
    assert caches.characters <= 100
    assert [scope for scope in range(5) if caches.guess(scope, "query", None, None)] == [3, 4]
    caches.learn("large", "query", [Document(page_content=str(at) * 60) for at in range(3)])
    assert caches.characters <= 100 and caches.guess("large", "query", None, None) is None
    small = DocumentCaches(max_characters=0)
    small.learn(1, "query", [Document(page_content="x")])
    assert small.characters == 0 and small.guess(1, "query", None, None) is None
    many = DocumentCaches(max_characters=1 << 30)
    for scope in range(MAX_SCOPES + 5):
        many.learn(scope, "q", [Document(page_content="x")])
    assert many.guess(0, "q", None, None) is None and many.guess(5, "q", None, None)


def test_a_document_without_an_id_is_known_by_its_content():
    one, other = Document(page_content="a", metadata={"n": 1}), Document(page_content="a", metadata={"n": 2})
    assert key_of(one) == key_of(one.model_copy()) != key_of(other)
    assert key_of(Document(id="7", page_content="a")) == key_of(Document(id="7", page_content="b"))


def test_metadata_may_have_keys_of_any_type():
    """As pandas and pickled documents bring them; keys that JSON would make equal tell documents apart."""
    mixed = {1: "a", "b": {None: 2, "c": [{("d", 1): 3, "e": 4}]}, 2.5: object}
    one = Document(page_content="a", metadata=mixed)
    assert key_of(one) == key_of(Document(page_content="a", metadata=dict(reversed(mixed.items()))))
    assert key_of(Document(page_content="a", metadata={1: "a"})) != key_of(
        Document(page_content="a", metadata={"1": "a"})
    )
    caches = DocumentCaches(max_characters=1000)
    caches.learn(1, "q", [one])
    assert caches.guess(1, "q", None, None) == [one]


@pytest.mark.parametrize("k", [0, -1])
async def test_a_call_asks_for_one_document_at_least(k: int):
    retriever, inner = around(k=2)
    with pytest.raises(ConfigurationError, match=f"at least one document, not {k}"):
        retriever.invoke("the cat", k=k)
    with pytest.raises(ConfigurationError, match="at least one"):
        await retriever.ainvoke("the cat", k=k)
    assert not inner.asked and len(retriever.invoke("the cat", k=3)) == 3


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_process_waits_for_no_thread_of_its_parent():
    retriever, inner = around(mode="correct", scope="retriever")
    retriever.invoke("the cat")
    retriever.settle()
    inner.go.clear()
    retriever.prefetch(["a stone"])  # under way in a thread that the child has not
    while retriever._coalescer._in_flight == {}:
        time.sleep(0.001)
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # ends it, should it wait
        inner.go = is_set()
        found = [retriever.invoke("a stone"), retriever.invoke("a stone"), retriever.settle()]
        os._exit(retriever.stats.confirmed != 1 or found[0] != found[1])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    inner.go.set()
    retriever.settle()


def test_metadata_may_hold_what_cannot_be_copied():
    documents = [Document(id="1", page_content="the cat", metadata={"lock": threading.Lock(), "n": 1})]
    retriever, _ = around(Scripted(documents=documents), mode="correct", scope="retriever")
    first = retriever.invoke("the cat")
    first[0].metadata["n"] = 2
    assert retriever.invoke("the cat") == documents and not retriever.settle()


def test_a_document_that_changed_replaces_itself():
    caches = DocumentCaches(max_characters=1000)
    caches.learn(1, "q", [Document(id="7", page_content="old")])
    caches.learn(1, "r", [Document(id="7", page_content="new")])
    found = caches.guess(1, "q", None, None)
    assert found is not None and [one.page_content for one in found] == ["new"]
    assert caches.characters == len("new") + len("q") + len("r")
    assert caches.guess(1, "q", 5, None) == found

"""The state of one request of the server: its cache, what may follow, and what its client sent with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple

from agentspec.cache import CacheRequest
from agentspec.cache.index import Sourced
from agentspec.cache.tokens import MOST_TOKEN, Tokens
from agentspec.prediction import PredictedText
from agentspec.types import Labels, Source


class TokenTree(NamedTuple):
    """Tokens that may follow a context. `parents[i]` < i is a node, or -1 for the context itself."""

    tokens: list[int]
    parents: list[int]


EMPTY_TREE = TokenTree([], [])


class FoundTree(NamedTuple):
    """What a search found to follow a request's first `length` tokens, when so many `deletions` had been made."""

    tree: TokenTree
    length: int
    deletions: int


PREDICTION = "agentspec_prediction"
"""The field for extensions that holds the predicted answer's token ids."""
HOPELESS = 0.3  # a prediction that is less often right is not drafted from
MOST_PREDICTED = 16384  # tokens of a prediction that are followed
GROUP_SEARCHED = 5  # requests of a group, the oldest that are open, whose outputs are searched


class Ending(Enum):
    """How an output ended."""

    STOPPED = auto()  # by a token after which outputs end
    CUT = auto()  # at its length limit or at a stop string, in the middle of what the model would have written
    ABORTED = auto()  # it is no answer, and is not stored

    @classmethod
    def cut(cls, tokens: int) -> Ending:
        """The ending of an output cut after so many tokens. One token is a probe's answer, or what the first half of
        disaggregated serving writes.
        """
        return cls.CUT if tokens > 1 else cls.ABORTED


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """What the server knows of a request. Requests with the same `group`, salt and adapter draft from each other's open
    outputs; without a group those with the same prompt, if they are stored and shared.
    """

    labels: Labels = field(default_factory=Labels)
    salt: str | None = None
    adapter: str = ""
    adapter_path: str = ""
    stops: frozenset[int] = frozenset()
    max_tokens: int | None = None  # of output
    stop_strings: bool = False  # whether the output may end at one
    prediction: tuple[int, ...] = ()  # tokens of the answer, as its client predicts it
    store: bool = True
    share: bool = True  # else only the session keeps the output, and nothing is written
    speculation: bool = True
    group: str = ""


def client_fields(sent: Mapping[str, object]) -> dict[str, Any]:
    """The fields of `RequestInfo` that a client sends among an engine's fields for extensions, as `agentspec_session`
    and so on. A switch that cannot be read is off; other values that cannot be are left out.
    """
    names = [sent.get(f"agentspec_{label}") for label in ("session", "workflow", "step", "group")]
    *labels, group = (name if isinstance(name, str) else None for name in names)
    switches = {name: sent.get(f"agentspec_{name}", "on") == "on" for name in ("store", "share", "speculation")}
    return {"labels": Labels(*labels), "group": group or "", "prediction": prediction_in(sent), **switches}


def prediction_in(fields: Mapping[str, object]) -> tuple[int, ...]:
    """The first token ids of the answer that the client predicts; empty if they cannot be token ids."""
    given = fields.get(PREDICTION)
    if not isinstance(given, list):
        return ()
    first = given[:MOST_PREDICTED]
    return tuple(first) if all(type(token) is int and 0 <= token <= MOST_TOKEN for token in first) else ()


class Deletions:
    """Counts the deletions from all caches of this process."""

    count = 0

    @classmethod
    def note(cls, scope: object) -> None:
        cls.count += 1


class RequestState:
    """A request's state in the server's thread. The recorder sets `cache` when it has opened the cache."""

    __slots__ = (
        "cache finished found group group_key length output_length predicted prompt_length recorded request rounds"
        " source stopped tenant tree"
    ).split()

    def __init__(self, length: int, request: RequestInfo) -> None:
        self.length = self.prompt_length = length  # the former of prompt and output
        self.request = request
        self.output_length = 0  # tokens of output
        self.rounds = 0  # that it took part in
        self.finished = self.stopped = False  # at a stop token or at the length limit; at a stop token
        self.cache: CacheRequest | None = None
        self.recorded = True  # its output goes to the cache
        self.group: list[RequestState] = []  # the open requests of its group,
        self.group_key: tuple[object, ...] = ()  # which has this key
        self.tenant, self.source = "private", "cache"  # by which drafts are counted
        self.tree = EMPTY_TREE  # the last draft
        self.found = FoundTree(EMPTY_TREE, 0, -1)  # by the last search that ended
        self.predicted = PredictedText(request.prediction) if request.prediction and request.speculation else None

    def advance(self, fresh: Tokens) -> Tokens:
        """Follow new tokens of the request; returns those that are output.

        The target may sample tokens after the end of an output; the server cuts them off later.
        """
        if self.predicted is not None:
            self.predicted.follow(fresh.tolist())
        self.length += len(fresh)
        count = self._still_output(fresh)
        return fresh if count == len(fresh) else fresh[:count]

    def rewind(self, length: int) -> None:
        """The server has discarded the tokens behind the first `length`, if there are any: they are no output. What was
        recorded of them stays.
        """
        self.length = min(self.length, length)
        if self.output_length > (left := max(0, self.length - self.prompt_length)):
            self.output_length, self.finished, self.stopped = left, False, False

    def _still_output(self, fresh: Tokens) -> int:
        request, count = self.request, 0 if self.finished else len(fresh)
        if request.max_tokens is not None:
            count = min(count, request.max_tokens - self.output_length)
        if request.stops and not request.stops.isdisjoint(tokens := fresh[:count].tolist()):
            count = 1 + next(i for i, token in enumerate(tokens) if token in request.stops)
            self.finished = self.stopped = True
        self.output_length += count
        self.finished = self.finished or self.output_length == request.max_tokens
        return count

    @property
    def ending(self) -> Ending:
        """How the output ended, if it ends now. The server does not tell a stop string from an abort."""
        if self.stopped:
            return Ending.STOPPED
        return Ending.cut(self.output_length) if self.finished or self.request.stop_strings else Ending.ABORTED

    @property
    def drafts(self) -> bool:
        """Whether drafts are made for the request."""
        return self.request.speculation and not self.finished

    @property
    def indexes(self) -> list[Sourced]:
        """What drafts come from: its cache's indexes, and the sessions of the first requests of its group."""
        found = [] if (cache := self.cache) is None else cache.indexes
        for other in self.group[:GROUP_SEARCHED]:
            if other is not self and (theirs := other.cache) is not None:
                found = found + [one for one in theirs.indexes if one[1] == Source.SESSION]
        return found

    def from_prediction(self, limit: int, least: float = 0.0) -> list[int]:
        """What the client predicts next, as far as all of it is accepted with a probability of `least`; empty where the
        prediction is lost or has mostly been wrong of late.
        """
        text = self.predicted
        if text is None or not self.drafts or text.confidence < HOPELESS:
            return []
        return [token for count, token in enumerate(text.ahead(limit), 1) if text.confidence**count >= least]

"""What speculation did for an answer of a strategy, and the object `speculation` of answers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from itertools import chain
from typing import Any

from agentspec.types import Speculation, Usage


@dataclass(frozen=True, slots=True)
class MeasuredSpeculation(Speculation):
    """What speculation did for one answer, draft by draft: `drafts` has the tokens of each, and those accepted.

    No draft has more than `most` tokens. In the object `speculation` it is like any other.
    """

    drafts: tuple[tuple[int, int], ...] = ()
    most: int = 0
    detailed: bool = False

    @classmethod
    def of(cls, done: Speculation, drafts: Sequence[tuple[int, int]], most: int, detailed: bool) -> MeasuredSpeculation:
        counts = done.drafted, done.accepted, done.steps, done.estimated_seconds_saved
        return cls(*counts, drafts=tuple(drafts), most=most, detailed=detailed)

    def metrics(self) -> dict[str, Any]:
        """vLLM's `metrics.speculative_decoding`: what `--per-request-spec-decode-metrics` adds to answers (vLLM 0.29).

        Its steps are those with a draft.
        """
        lengths = [accepted for _, accepted in self.drafts]
        found: dict[str, Any] = {
            "mean_acceptance_length": 1.0 + (sum(lengths) / len(lengths) if lengths else 0.0),
            "draft_acceptance_rate": sum(lengths) / self.drafted if self.drafted else 0.0,
            "acceptance_histogram": [lengths.count(length) for length in range(self.most + 1)],
            "num_spec_steps": len(lengths),
            "num_accepted_draft_tokens": sum(lengths),
            "num_draft_tokens": self.drafted,
            "num_spec_tokens": self.most,
        }
        if self.detailed and lengths:
            found |= {"per_step_accepted": lengths, "per_step_drafted": [drafted for drafted, _ in self.drafts]}
        return found


@dataclass(frozen=True, slots=True)
class StepSpeculation(Speculation):
    """What delegating reasoning steps did for one answer. It is lossy: the settings in `knobs` trade quality for speed.

    `drafted` and `accepted` count the small model's tokens, `steps` the reasoning steps. `spent_tokens` counts all
    tokens that each role generated, dropped ones included. `estimated_seconds_saved` compares the time of the reasoning
    with that of as many tokens at the base model's own pace, measured while it writes; below 0, time was lost.
    `degraded` maps each abandoned model to the reason.
    """

    steps_are_forwards = False
    lossy: bool = True
    strategy: str = ""
    knobs: Mapping[str, Any] = field(default_factory=dict)
    proposed_steps: int = 0
    accepted_steps: int = 0
    kept_tokens: Mapping[str, int] = field(default_factory=dict)
    spent_tokens: Mapping[str, int] = field(default_factory=dict)
    ended: str = ""
    degraded: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class KnnSpeculation(Speculation):
    """What speculative retrieval did for one answer of KNN-LM. The answer equals that of a search for every token.

    `drafted` and `accepted` count guessed tokens. `wrong` counts the guesses that a search refuted; guesses after a
    wrong one are dropped unverified. `decided` tokens needed no neighbours. The others needed `queries`, sent in
    `searches` batches, whose sizes are in `strides`. The seconds are those of the model, of guessing meanwhile, and of
    searching the datastore.
    """

    lossy: bool = False
    strategy: str = "knnlm"
    wrong: int = 0
    decided: int = 0
    queries: int = 0
    searches: int = 0
    strides: tuple[int, ...] = ()
    model_seconds: float = 0.0
    guess_seconds: float = 0.0
    search_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class RetrievalSpeculation(Speculation):
    """What guessing documents did for one answer. The answer equals that of sequential retrieval.

    `drafted` and `accepted` count the tokens generated from guessed documents, `steps` the rounds of the answer.
    `queries` counts the queries sent to the knowledge base in `batches`; `hit_rate` is the share of right guesses, None
    without guesses; `strides` has the number of guesses that each batch verified, 0 where generation waited for the
    document. `redone` counts batches that met another version of the knowledge base. `seconds` has the time by part of
    the work.
    """

    steps_are_forwards = False
    lossy: bool = False
    strategy: str = ""
    knobs: Mapping[str, Any] = field(default_factory=dict)
    knowledge: str = ""
    queries: int = 0
    batches: int = 0
    hit_rate: float | None = None
    strides: tuple[int, ...] = ()
    redone: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)


_JSON_TYPES: dict[str, Any] = {"bool": bool, "str": str, "tuple": list, "Mapping": Mapping}  # all others are numbers
_MOST = 2**53  # every JSON parser keeps integers exact up to here
_KINDS = (StepSpeculation, RetrievalSpeculation, KnnSpeculation)


def read_speculation(value: Mapping[str, Any]) -> Speculation | None:
    """Read a gateway's `speculation` object as the class it came from; None for another product's object.

    Raises `TypeError`, `ValueError` or `OverflowError` for an object of the wrong shape, and for what JSON cannot write
    again: Python reads NaN, and numbers beyond a double's range as infinity.
    """
    if not all(field.name in value for field in fields(Speculation)):
        return None
    json.dumps(value, allow_nan=False)
    counts: dict[str, Any] = {name: count_of(value[name]) for name in ("drafted", "accepted", "steps")}
    counts["estimated_seconds_saved"] = float(value["estimated_seconds_saved"])
    if "strategy" not in value:
        return Speculation(**counts)
    kind: type[Speculation] = max(_KINDS, key=lambda kind: sum(field.name in value for field in fields(kind)))
    own: dict[str, Any] = {}
    for member in fields(kind):  # a value of another type is left out
        fitting = _JSON_TYPES.get(re.split(r"\W", str(member.type))[0], (int, float))
        if isinstance(one := value.get(member.name), fitting):
            own[member.name] = tuple(one) if isinstance(one, list) else one
    return kind(**own | counts)


def reported_speculation(answer: Mapping[str, Any], usage: Usage | None) -> Speculation | None:
    """What an answer or its last chunk reports: our object `speculation`, or vLLM's metrics of the request.

    vLLM counts the forwards with a draft; of all, each gives one token more than it accepts. Raises as
    `read_speculation` does.
    """
    if given := answer.get("speculation"):
        return read_speculation(given)
    metrics = answer.get("metrics")
    found = metrics.get("speculative_decoding") if isinstance(metrics, Mapping) else None
    if usage is None or not isinstance(found, Mapping):
        return None
    drafted, accepted = (count_of(found.get(f"num_{name}")) for name in ("draft_tokens", "accepted_draft_tokens"))
    return Speculation(drafted, accepted, max(1, usage.completion_tokens - accepted))


def summed(parts: Sequence[Speculation]) -> Speculation | None:
    """What speculation did for all answers to one request, in the class that says most; None without any.

    Counts and times add up. Of the other fields a value on which all agree stays, such as the strategy and its knobs;
    else the default, as of a share of right guesses.
    """
    if not parts:
        return None
    widest = max(parts, key=lambda part: len(fields(part)))
    return replace(widest, **{field.name: _summed(field, parts) for field in fields(widest)})


def _summed(field: Field[Any], parts: Sequence[Speculation]) -> Any:
    values = [getattr(part, field.name) for part in parts if hasattr(part, field.name)]
    if field.type in ("int", "float"):
        return sum(values)
    if field.type == "tuple[int, ...]":
        return tuple(chain.from_iterable(values))
    if field.type in ("Mapping[str, int]", "Mapping[str, float]"):
        return {key: sum(value.get(key, 0) for value in values) for key in dict.fromkeys(chain(*values))}
    if all(value == values[0] for value in values):
        return values[0]
    return field.default if field.default_factory is MISSING else field.default_factory()


def count_of(value: Any) -> int:
    """A server's count, held to what JSON can write exactly; null counts as 0."""
    return min(max(0, int(value or 0)), _MOST)

"""Typed values out of a request body: each field is acted on, or known to be inert, or refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from agentspec.errors import InvalidRequestError
from agentspec.types import GenerateRequest, SamplingParams, StructuredOutputs

T = TypeVar("T")

MAX_STOPS = 64
MAX_BIASES = 1024
MAX_CHOICES_OF_TEXT = 4096
MAX_TOKEN_ID = 2**31 - 1
_SEEDS = range(-(2**63), 2**63)

# Accepted and without effect on a local answer: they address a hosted service's billing, storage or abuse handling.
INERT = frozenset(
    {"metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "store", "user"}
)

# Fields of vLLM's that are taken where they say what is done anyway.
USUAL = {
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "use_beam_search": False,
    "length_penalty": 1.0,
}


class Fields:
    """The top-level fields of a body. What was never taken is refused by `finish`. A null counts as absent.

    Every method raises `InvalidRequestError` with `param` naming the field.
    """

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._left = {name: value for name, value in body.items() if value is not None and name not in INERT}

    def take(self, name: str, convert: Callable[[str, Any], T], default: T) -> T:
        return convert(name, self._left.pop(name)) if name in self._left else default

    def take_only(self, name: str, *allowed: Any) -> None:
        """Accept the field where its value asks for nothing: refuse any value but those in `allowed`."""
        value = self._left.pop(name, allowed[0])
        if not any(value == choice and type(value) is type(choice) for choice in allowed):
            raise InvalidRequestError(f"{name} = {_short(value)} is not supported by this model", param=name)

    def finish(self) -> None:
        for name in self._left:
            shown = name[:80].encode("ascii", "replace").decode()
            raise InvalidRequestError(f"the field {shown!r} is not known or not supported by this model", param=shown)


def boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise wrong(name, "a boolean", value)
    return value


def integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong(name, "an integer", value)
    return value


def count(name: str, value: Any) -> int:
    if not 0 <= integer(name, value) <= MAX_TOKEN_ID:
        raise InvalidRequestError(f"{name} must lie between 0 and {MAX_TOKEN_ID}", param=name)
    return int(value)


def number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise wrong(name, "a number", value)
    try:
        converted = float(value)
    except OverflowError:
        converted = math.inf
    if not math.isfinite(converted):
        raise InvalidRequestError(f"{name} is too large", param=name)
    return converted


def string(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise wrong(name, "a string", value)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidRequestError(f"{name} holds half a surrogate pair, which is not text", param=name) from None
    return value


def array(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise wrong(name, "an array", value)
    return value


def mapping(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong(name, "an object", value)
    return value


def text_parts(name: str, value: Any) -> str:
    """A string, or an array of `{"type": "text", "text": ...}` parts, which are joined as they are."""
    if isinstance(value, str):
        return string(name, value)
    if not isinstance(value, list):
        raise wrong(name, "a string or an array of text parts", value)
    return "".join(_text_part(f"{name}[{index}]", part) for index, part in enumerate(value))


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    return tuple(count(name, token) for token in array(name, value))


def take_sampling(fields: Fields, *, max_tokens: int | None, logprobs: bool, top_logprobs: int) -> SamplingParams:
    """The fields that both routes share, and those that they spell differently, as sampling parameters."""
    return SamplingParams(
        temperature=fields.take("temperature", number, 1.0),
        top_p=fields.take("top_p", number, 1.0),
        top_k=max(0, fields.take("top_k", integer, 0)),  # -1 is how vLLM writes "off"
        min_p=fields.take("min_p", number, 0.0),
        presence_penalty=fields.take("presence_penalty", number, 0.0),
        frequency_penalty=fields.take("frequency_penalty", number, 0.0),
        repetition_penalty=fields.take("repetition_penalty", number, 1.0),
        logit_bias=fields.take("logit_bias", _logit_bias, {}),
        seed=fields.take("seed", _seed, None),
        stop=fields.take("stop", _stop, ()),
        stop_token_ids=fields.take("stop_token_ids", _stop_token_ids, ()),
        max_tokens=max_tokens,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        **take_rules(fields, SamplingParams()),
    )


def take_rules(fields: Fields, given: SamplingParams) -> dict[str, Any]:
    """How many answers, how long and of what form at least, as parameters; those of `given` where nothing is said."""
    for name, usual in USUAL.items():
        fields.take_only(name, usual)
    return {
        "n": fields.take("n", count, given.n),
        "min_tokens": fields.take("min_tokens", count, given.min_tokens),
        "ignore_eos": fields.take("ignore_eos", boolean, given.ignore_eos),
        "bad_words": fields.take("bad_words", _bad_words, given.bad_words),
        "structured_outputs": take_structured_outputs(fields) or given.structured_outputs,
        "prompt_logprobs": fields.take("prompt_logprobs", count, given.prompt_logprobs),
    }


def take_service(fields: Fields, given: GenerateRequest) -> dict[str, Any]:
    """How soon the request is to be served. Its `priority` may put it behind others, never before them."""
    return {
        "priority": fields.take("priority", count, given.priority),
        "latency_target_ms_per_token": fields.take(
            "latency_target_ms_per_token", number, given.latency_target_ms_per_token
        ),
    }


def take_structured_outputs(fields: Fields) -> StructuredOutputs | None:
    """The form of the answer, by OpenAI's `response_format`, vLLM's `structured_outputs` or its older `guided_*`."""
    older = ((f"guided_{name}", name) for name in ("json", "regex", "choice", "grammar"))
    found = {
        "response_format": fields.take("response_format", _response_format, None),
        "structured_outputs": fields.take("structured_outputs", _structured_outputs, None),
        **{name: fields.take(name, partial(_structured, kind), None) for name, kind in older},
    }
    given = {name: form for name, form in found.items() if form is not None}
    if len(given) > 1:
        raise InvalidRequestError(f"send one of {', '.join(given)}, not all", param=next(iter(given)))
    return next(iter(given.values()), None)


def _response_format(name: str, value: Any) -> StructuredOutputs | None:
    wanted = mapping(name, value)
    kind = wanted.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputs(json_object=True)
    if kind != "json_schema":
        raise InvalidRequestError(f"{name}.type must be text, json_object or json_schema", param=f"{name}.type")
    described = mapping(f"{name}.json_schema", wanted.get("json_schema"))
    return _structured("json", f"{name}.json_schema.schema", described.get("schema"))


def _structured_outputs(name: str, value: Any) -> StructuredOutputs:
    given = {kind: one for kind, one in mapping(name, value).items() if one is not None}
    if len(given) != 1:
        raise InvalidRequestError(f"{name} must hold exactly one kind of form, not {len(given)}", param=name)
    [(kind, one)] = given.items()
    return _structured(kind, f"{name}.{kind}"[:80].encode("ascii", "replace").decode(), one)


def _structured(kind: str, name: str, value: Any) -> StructuredOutputs:
    if kind == "json":
        return StructuredOutputs(json=_schema(name, value))
    if kind == "json_object":
        return StructuredOutputs(json_object=boolean(name, value))
    if kind == "choice":
        _at_most(name, len(array(name, value)), MAX_CHOICES_OF_TEXT)
        return StructuredOutputs(choice=tuple(string(name, choice) for choice in value))
    if kind == "regex":
        return StructuredOutputs(regex=string(name, value))
    if kind == "grammar":
        return StructuredOutputs(grammar=string(name, value))
    raise InvalidRequestError(f"{name} is not supported by this model", param=name)


def _schema(name: str, value: Any) -> dict[str, Any] | bool:
    if isinstance(value, str):  # vLLM takes a schema written out as well
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise InvalidRequestError(f"{name} is a string that is not JSON", param=name) from None
    return value if isinstance(value, bool) else mapping(name, value)


def take_stream(fields: Fields) -> tuple[bool, bool]:
    """Whether to stream, and whether the stream ends with the usage."""
    stream = fields.take("stream", boolean, False)
    options: dict[str, Any] = fields.take("stream_options", mapping, {})
    if options and not stream:
        raise InvalidRequestError("stream_options needs stream = true", param="stream_options")
    inner = Fields(options)
    try:
        include_usage = inner.take("include_usage", boolean, False)
        inner.take_only("include_obfuscation", False)
        inner.take_only("continuous_usage_stats", False)
        inner.finish()
    except InvalidRequestError as error:
        raise InvalidRequestError(error.message, param=f"stream_options.{error.param}") from None
    return stream, include_usage


def wrong(name: str, wanted: str, value: Any) -> InvalidRequestError:
    return InvalidRequestError(f"{name} must be {wanted}, not {_kind(value)}", param=name)


def _text_part(name: str, part: Any) -> str:
    fields = mapping(name, part)
    if fields.get("type") != "text":
        raise InvalidRequestError(f"{name}: this model reads parts of type 'text' only", param=name)
    return string(f"{name}.text", fields.get("text"))


def _seed(name: str, value: Any) -> int | None:
    if integer(name, value) not in _SEEDS:
        raise InvalidRequestError(f"{name} must be a 64-bit integer", param=name)
    return int(value)


def _stop(name: str, value: Any) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else tuple(array(name, value))
    _at_most(name, len(stops), MAX_STOPS)
    return tuple(string(name, stop) for stop in stops)


def _stop_token_ids(name: str, value: Any) -> tuple[int, ...]:
    _at_most(name, len(array(name, value)), MAX_STOPS)
    return token_ids(name, value)


def _bad_words(name: str, value: Any) -> tuple[str, ...]:
    _at_most(name, len(array(name, value)), MAX_STOPS)
    return tuple(string(name, word) for word in value)


def _logit_bias(name: str, value: Any) -> dict[int, float]:
    _at_most(name, len(mapping(name, value)), MAX_BIASES)
    for key in value:
        if not (key.isascii() and key.isdigit() and len(key) < 11 and int(key) <= MAX_TOKEN_ID):
            raise InvalidRequestError(f"{name} keys must be token ids", param=name)
    return {int(key): number(name, bias) for key, bias in value.items()}


def _at_most(name: str, length: int, limit: int) -> None:
    if length > limit:
        raise InvalidRequestError(f"{name} has {length} entries; {limit} are allowed", param=name)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _short(value: Any) -> str:
    return repr(value) if isinstance(value, (int, float)) else _kind(value)

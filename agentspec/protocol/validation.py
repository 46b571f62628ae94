"""Pydantic models of request bodies. Their errors are sentences that name the field, as OpenAI's `param` does."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from agentspec.errors import InvalidRequestError, suggestion

T = TypeVar("T")
M = TypeVar("M", bound="Model")

MAX_STOPS = 64
MAX_PHRASE = 1024
MAX_TOKEN_ID = 2**31 - 1

# Accepted without effect: these fields serve a hosted service's billing, storage, regions, caches or abuse handling.
INERT = frozenset(
    "metadata prompt_cache_key prompt_cache_options prompt_cache_retention safety_identifier service_tier session_id"
    " store user anthropic_beta anthropic_version betas cache_control diagnostics inference_geo speed user_profile_id"
    " workspace_id".split()
)
# Errors name these lists and objects, and not their items: `stop`, not `stop[3]`.
_UNDIVIDED = re.compile(r"(^|\.)(bad_words|logit_bias|prompt|stop|stop_token_ids|(guided_)?choice)$")
_EXPECTED = {
    "bool_type": "a boolean",
    "dict_type": "an object",
    "float_type": "a number",
    "int_type": "an integer",
    "list_type": "an array",
    "model_type": "an object",
    "string_type": "a string",
}


class Refused(ValueError):
    """Raised for a refused value. `sentence` follows the field's name, or the name of its part `below`."""

    def __init__(self, sentence: str, below: str = "") -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.below = below


def must(holds: Callable[[Any], bool], sentence: str) -> AfterValidator:
    """Refuse a value of the right type for which `holds` is false."""

    def check(value: Any) -> Any:
        if not holds(value):
            raise Refused(sentence)
        return value

    return AfterValidator(check)


def only(*allowed: Any) -> BeforeValidator:
    """Accept an unsupported field only with one of the `allowed` values, with which it changes nothing."""

    def check(value: Any) -> Any:
        if not any(value == choice and type(value) is type(choice) for choice in allowed):
            raise Refused(f" = {short(value)} is not supported by this model")
        return value

    return BeforeValidator(check)


def one_of(*allowed: Any) -> AfterValidator:
    """Refuse every other value."""
    listed = "one of " * (len(allowed) > 1) + ", ".join(map(str, allowed))
    return must(lambda value: value in allowed, f" must be {listed}")


def is_text(value: str) -> bool:
    """Whether UTF-8 can encode `value`: JSON can write a lone surrogate, UTF-8 cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _finite(value: Any) -> Any:
    if isinstance(value, (int, float)) and not abs(value) <= sys.float_info.max:
        raise Refused(" is too large")
    return value


REQUIRED: Any = Field(default=None, validate_default=True)  # a missing field counts as null
NOT_TEXT = " holds a lone surrogate, which is not text"
Text = Annotated[str, must(is_text, NOT_TEXT)]
NonEmpty = Annotated[Text, must(bool, " must not be empty")]
Number = Annotated[float, BeforeValidator(_finite)]
Count = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
# Stop strings and bad words are compared with the answer at every token.
Phrase = Annotated[Text, must(lambda text: len(text) <= MAX_PHRASE, f" must have at most {MAX_PHRASE} characters")]
Texts = Annotated[list[Phrase], Field(max_length=MAX_STOPS, fail_fast=True), AfterValidator(tuple)]
TokenIds = Annotated[list[Count], Field(fail_fast=True), AfterValidator(tuple)]
FewTokenIds = Annotated[list[Count], Field(max_length=MAX_STOPS, fail_fast=True), AfterValidator(tuple)]


TEXT: TypeAdapter[str] = TypeAdapter(Text)
OBJECT: TypeAdapter[Mapping[str, Any]] = TypeAdapter(dict[str, Any])


def validated(type: TypeAdapter[T], value: Any, name: str) -> T:
    """Validate the value of the field `name`. Raises `InvalidRequestError` with `param`."""
    try:
        return type.validate_python(value, strict=True)
    except ValidationError as error:
        raise _refusal(error, name) from None


class Model(BaseModel):
    """An object in a request; it ignores fields that it does not declare."""

    model_config = ConfigDict(strict=True, frozen=True)

    @classmethod
    def parse(cls, value: Any, name: str = "") -> Self:
        """Validate the value of the field `name` as this model. Raises `InvalidRequestError` with `param`."""
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            raise _refusal(error, name) from None


class Closed(Model):
    """An object with known members alone: declared, or `inert`. Null counts as absent, and an unknown member that
    is empty says nothing.
    """

    inert: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        known = cls.model_fields
        for key, given in value.items():
            if key not in known and key not in cls.inert and given not in (None, "", [], {}):
                hint = suggestion(key[:80], {*known, *cls.inert})
                raise Refused(f" is not known or not supported by this model{hint}", f".{shown_name(key)}")
        return {key: given for key, given in value.items() if key in known and given is not None}

    def given(self, *names: str) -> dict[str, Any]:
        """The members among `names` that the request sets."""
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class Body(Closed):
    """The top-level fields of a request."""

    inert: ClassVar[frozenset[str]] = INERT


def read_one(value: Any, name: str, kinds: Mapping[str, type[M]], key: str = "type") -> M:
    """The object `value`, of the field `name`, as the model that its member `key` names in `kinds`.

    Raises `InvalidRequestError` with `param`.
    """
    if not isinstance(value, dict):
        raise wrong_type(name, "an object", value)
    kind = value.get(key)
    if not isinstance(kind, str) or kind not in kinds:
        shown = repr(shown_name(kind)) if isinstance(kind, str) else kind_of(kind)
        message = f"{name}.{key} {shown} is not supported here; known: {', '.join(kinds)}"
        raise InvalidRequestError(message, param=f"{name}.{key}")
    return kinds[kind].parse(value, name)


def read_parts(value: Any, name: str, kinds: Mapping[str, type[M]]) -> list[M]:
    """The parts of a content: an array of objects of `kinds`, or a string, which is one part of the first kind."""
    if isinstance(value, str):
        kind, model = next(iter(kinds.items()))
        return [model.parse({"type": kind, "text": validated(TEXT, value, name)})]
    if not isinstance(value, list):
        raise wrong_type(name, "a string or an array of parts", value)
    return [read_one(part, f"{name}[{index}]", kinds) for index, part in enumerate(value)]


def checked_length(value: Any, name: str, most: int) -> list[Any]:
    """`value`, an array of at most `most` entries."""
    if not isinstance(value, list):
        raise wrong_type(name, "an array", value)
    if len(value) > most:
        raise InvalidRequestError(f"{name} has {len(value)} entries; {most} are allowed", param=name)
    return value


def wrong_type(name: str, expected: str, value: Any) -> InvalidRequestError:
    """The error for a value of another JSON type."""
    return InvalidRequestError(f"{name} must be {expected}, not {kind_of(value)}", param=name)


def kind_of(value: Any) -> str:
    """JSON's name for the type of `value`, with its article."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def shown_name(name: str) -> str:
    """A client's name for a field, shortened to 80 ASCII characters for a message."""
    return name[:80].encode("ascii", "replace").decode()


def _refusal(error: ValidationError, name: str) -> InvalidRequestError:
    """Turn pydantic's first error into a sentence."""
    found = error.errors(include_url=False)[0]
    for part in found["loc"]:
        if not _UNDIVIDED.search(name):
            name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else part
    if found["type"] == "value_error":
        refused = found.get("ctx", {})["error"]
        name, sentence = (name + refused.below).removeprefix("."), refused.sentence
    elif found["type"] == "too_long":
        sentence = f" has {len(found['input'])} entries; {found.get('ctx', {})['max_length']} are allowed"
    elif found["type"] in ("greater_than_equal", "less_than_equal"):
        sentence = f" must lie between 0 and {MAX_TOKEN_ID}"
    else:
        sentence = f" must be {_EXPECTED[found['type']]}, not {kind_of(found['input'])}"
    return InvalidRequestError(f"{name}{sentence}", param=name)


def short(value: Any) -> str:
    """A value as an error message shows it: numbers and booleans literally, other values by their type."""
    return repr(value)[:40] if isinstance(value, (int, float)) else kind_of(value)


MAX_JSON_DEPTH = 100  # levels of objects and arrays: whatever writes or compiles a value calls itself for each
MAX_JSON_VALUES = 100_000


def check_json(value: Any, name: str, *, param: str | None = None) -> None:
    """Raise `InvalidRequestError` unless `value`, of the field `name`, is JSON that every later reader can take.

    Refuses nesting beyond `MAX_JSON_DEPTH` levels, more than `MAX_JSON_VALUES` keys and values, strings that are not
    text, numbers beyond 64-bit floats, and Python objects that JSON cannot write. Never recursive: goes level by level.
    `param` is the error's, the name itself if not given.
    """
    param = param or name
    level, count = [value], 0
    for _ in range(MAX_JSON_DEPTH + 1):
        inner: list[Any] = []
        for one in level:
            fault: str | None = None
            if isinstance(one, (list, tuple)):
                inner += one
            elif isinstance(one, dict) or (not isinstance(one, str | int | float | None) and isinstance(one, Mapping)):
                inner += one.keys()
                inner += one.values()
                fault = None if all(isinstance(key, str) for key in one) else "has a key that is not a string"
            else:
                fault = _fault(one)
            if fault is not None:
                raise InvalidRequestError(f"{name} {fault}", param=param)
            if count + len(inner) > MAX_JSON_VALUES:
                raise InvalidRequestError(f"{name} has more than {MAX_JSON_VALUES:,} keys and values", param=param)
        if not inner:
            return
        level, count = inner, count + len(inner)
    raise InvalidRequestError(f"{name} is nested more than {MAX_JSON_DEPTH} levels deep", param=param)


def _fault(value: Any) -> str | None:
    """What is wrong with a value that is neither a plain string nor a container."""
    if isinstance(value, str):
        return None if value.isascii() or is_text(value) else NOT_TEXT.strip()
    if value is None or isinstance(value, (int, float)):
        large = not abs(value or 0) <= sys.float_info.max  # NaN is not
        return "holds a number beyond the range of 64-bit floats" if large else None
    return f"holds a Python {type(value).__name__}, which is not JSON"

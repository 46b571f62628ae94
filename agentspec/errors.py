"""The error classes, each with the HTTP status and the OpenAI `type` and `code` that the gateway reports.

AgentSpecError
├── ConfigurationError            settings that cannot work
├── InvalidRequestError      400  the caller's mistake
│   ├── ContextLengthError   400  prompt and max_tokens do not fit the model
│   ├── ModelNotFoundError   404  no configured model has this name
│   ├── OverRateLimitError   400  asks for more tokens than the key's limits ever allow
│   ├── SlowClientError      408  the request did not arrive in time
│   ├── HostNotAllowedError  421  the Host header names another server
│   ├── OriginNotAllowedError 403 the request comes from another site's web page
│   └── HeadersTooLargeError 431  target and headers are over the configured limit
├── AuthenticationError      401  missing or wrong API key
├── PermissionDeniedError    403  the API key is for other routes
├── RequestTooLargeError     413  body over the configured limit
├── OverloadedError          429  queue full; `retry_after` seconds
│   └── RateLimitError       429  a limit of the API key is reached; `limit` names it
├── NotReadyError            503  the server is still loading its models
├── AnswerMemoryError        503  there is no memory for an upstream's large answer now
├── ShuttingDownError        503  the server is draining
├── RequestTimeoutError      504  no answer within the request's time limit
├── ModelUnavailableError    500  a model's files cannot be fetched, read or verified
├── EngineError              500  the local engine failed on this request
│   └── EngineStoppedError   503  the local engine can compute nothing any more: its device failed
├── CacheError               500  the cache cannot do what the caller requested
│   ├── CacheClosedError          a cache that is used after close()
│   ├── CacheLockedError          another process writes to the folder
│   ├── CacheUnavailableError     the database cannot be used now: no permission, disk full, no server
│   └── CacheFormatError          files on disk cannot be used
│       ├── CacheVersionError     files of another version of the format, or of another byte order
│       ├── CacheNamespaceError   files of another tenant, model, tokenizer or chat template
│       └── CacheDamagedError     files whose content differs from what was written
├── KnowledgeBaseError       502  a knowledge base could not be searched, or gave no usable answer
└── UpstreamError            502  an upstream could not be reached, or ended the answer early
    ├── UpstreamAuthenticationError  an upstream refused the key that the operator configured for it
    ├── UpstreamIsolationError  503  an upstream cannot keep the requests of several tenants apart
    ├── UpstreamTimeoutError 504  an upstream did not answer in time
    ├── NoServerError        503  no server of a pool can take the call now; `retry_after` seconds
    └── UpstreamStatusError       an upstream answered with an error; `status`, `body` and `headers` are its own
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


def doc_url(code: str) -> str:
    """The line of the documentation that says what a code means and what to do, in this version's source."""
    return f"docs/errors.md#{code}"


class AgentSpecError(Exception):
    """The base class of all errors that agentspec raises deliberately."""

    status = 500
    type = "server_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def body(self) -> dict[str, Any]:
        """The OpenAI error body: `{"error": {message, type, param, code, doc_url}}`."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": {**error, "doc_url": doc_url(self.code or self.type)}}


class ConfigurationError(AgentSpecError):
    code = "configuration_error"


class InvalidRequestError(AgentSpecError):
    status = 400
    type = "invalid_request_error"


class ContextLengthError(InvalidRequestError):
    code = "context_length_exceeded"


class ModelNotFoundError(InvalidRequestError):
    status = 404
    code = "model_not_found"


class OverRateLimitError(InvalidRequestError):
    code = "request_over_rate_limit"


class SlowClientError(InvalidRequestError):
    status = 408
    code = "client_too_slow"


class HostNotAllowedError(InvalidRequestError):
    status = 421
    code = "host_not_allowed"


class OriginNotAllowedError(InvalidRequestError):
    status = 403
    code = "origin_not_allowed"


class HeadersTooLargeError(InvalidRequestError):
    status = 431
    code = "headers_too_large"


class AuthenticationError(AgentSpecError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class PermissionDeniedError(AgentSpecError):
    status = 403
    type = "permission_error"
    code = "permission_denied"


class RequestTooLargeError(AgentSpecError):
    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class OverloadedError(AgentSpecError):
    status = 429
    type = "rate_limit_error"
    code = "overloaded"

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RateLimitError(OverloadedError):
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, limit: str, retry_after: int) -> None:
        super().__init__(message, retry_after=retry_after)
        self.limit = limit


class NotReadyError(AgentSpecError):
    status = 503
    code = "not_ready"


class AnswerMemoryError(AgentSpecError):
    status = 503
    code = "answer_memory"


class ShuttingDownError(AgentSpecError):
    status = 503
    code = "shutting_down"


class RequestTimeoutError(AgentSpecError):
    status = 504
    code = "request_timeout"


class ModelUnavailableError(AgentSpecError):
    code = "model_unavailable"


class EngineError(AgentSpecError):
    code = "engine_error"


class EngineStoppedError(EngineError):
    status = 503
    code = "engine_stopped"


class CacheError(AgentSpecError):
    code = "cache_error"


class CacheClosedError(CacheError):
    code = "cache_closed"


class CacheLockedError(CacheError):
    code = "cache_locked"


class CacheUnavailableError(CacheError):
    code = "cache_unavailable"


class CacheFormatError(CacheError):
    code = "cache_format"


class CacheVersionError(CacheFormatError):
    code = "cache_version"


class CacheNamespaceError(CacheFormatError):
    code = "cache_namespace"


class CacheDamagedError(CacheFormatError):
    code = "cache_damaged"


class UpstreamError(AgentSpecError):
    """`retryable`: nothing of an answer has come, so that another server of the model may be asked."""

    status = 502
    type = "upstream_error"
    code = "upstream_unreachable"
    retryable = False


class UpstreamAuthenticationError(UpstreamError):
    code = "upstream_authentication"


class UpstreamIsolationError(UpstreamError):
    status = 503
    code = "upstream_isolation"
    retryable = True


class UpstreamTimeoutError(UpstreamError):
    status = 504
    code = "upstream_timeout"


class NoServerError(UpstreamError):
    status = 503
    code = "no_server_available"

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class UpstreamStatusError(UpstreamError):
    """An upstream's whole error response, so that a gateway can pass it on unchanged.

    `own_key`: the request carried the operator's key. `for_client`: a refusal of its key is a gateway's client's.
    """

    code = "upstream_status"
    own_key = False
    for_client = False

    def __init__(self, message: str, *, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        super().__init__(message)
        self.status = status
        self.upstream_body = body
        self.headers = dict(headers)


class KnowledgeBaseError(AgentSpecError):
    status = 502
    code = "knowledge_base_error"


# The packages that each extra installs, by the names under which they are imported.
EXTRAS: Mapping[str, tuple[str, ...]] = {
    "proxy": ("starlette", "uvicorn", "uvloop", "httpx2", "jinja2", "orjson", "prometheus_client"),
    "torch": (
        *("torch", "transformers", "accelerate", "gguf", "huggingface_hub"),
        *("jinja2", "llguidance", "safetensors"),
    ),
    "langgraph": ("langgraph", "langchain", "langchain_core"),
    "retrieval": ("bm25s", "faiss"),
    "postgres": ("psycopg",),
    "otel": ("opentelemetry",),
}


def suggestion(name: str, known: Iterable[str]) -> str:
    """A hint at the nearest known name; empty if none is near."""
    nearest = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""


def extra_of(module: str | None, extras: Iterable[str] = EXTRAS) -> str | None:
    """The first of `extras` that installs `module`; None if none does."""
    package = (module or "").partition(".")[0]
    return next((extra for extra in extras if package in EXTRAS[extra]), None)


def install_advice(extra: str) -> str:
    """How to install `extra`: from the sources, since no package index has this package."""
    return f"in a checkout of agentspec, run: pip install '.[{extra}]'"


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Around imports that need `extra`: where one of its packages is missing, the `ModuleNotFoundError` says what
    installs it. Any other module that is missing is another defect, whose error stays as it is.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if "pip install" in str(error) or not extra_of(error.name, [extra]):  # an import inside has said so already
            raise
        raise ModuleNotFoundError(f"{error}; {install_advice(extra)}", name=error.name) from error

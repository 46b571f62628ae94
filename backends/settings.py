"""Settings of the backends, composed into the application's settings, and the files of keys that settings name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, ByteSize, Field, HttpUrl, SecretStr, model_validator

from agentspec.errors import ConfigurationError
from agentspec.settings_model import SettingsModel

_HOST = r"^[A-Za-z0-9]([A-Za-z0-9.-]{0,252}[A-Za-z0-9])?(:[0-9]{1,5})?$|^[0-9a-fA-F:]*:[0-9a-fA-F:.]*$"


def _root(url: HttpUrl) -> HttpUrl:
    if url.query is not None or url.fragment is not None or "%20" in (url.path or ""):
        raise ValueError("must be the root of an API, such as http://host:8000/v1, without blanks, ? and #")
    return HttpUrl(str(url).rstrip("/"))  # one that ends with a slash is the same server


ServerRoot = Annotated[HttpUrl, AfterValidator(_root)]
"""The root of a server's API, to which paths are added."""


class TorchSettings(SettingsModel):
    """`[backends.NAME] kind = "torch"`: a model run by the local engine."""

    local: ClassVar[bool] = True  # computes in this process, with a token cache
    has_several_servers: ClassVar[bool] = False

    kind: Literal["torch"] = "torch"
    model: str = Field(default="smollm2-135m", description="Built-in name, folder, GGUF file or model-hub id")
    device: str = Field(default="auto", description="auto, cpu, cuda, cuda:N or mps")
    dtype: str = Field(default="auto", description="auto, float32, bfloat16 or float16")
    max_active: int = Field(default=16, ge=1, description="Requests decoded together; the others wait")
    kv_bytes: ByteSize | None = Field(
        default=None,
        gt=0,
        description="Key/value memory; unset takes 80 % of a GPU's free memory, or half of a CPU's but at most 4 GiB",
    )
    max_draft_tokens: int = Field(default=48, ge=0, description="Most tokens drafted a step; 0 turns speculation off")
    draft_model: str | None = Field(default=None, description="A small model of the same vocabulary that drafts")
    per_request_spec_decode_metrics: Literal["none", "summary", "detailed"] = Field(
        default="none",
        description="Add vLLM's `metrics.speculative_decoding` to answers with one choice; `detailed`: for each step",
    )


class OpenAISettings(SettingsModel):
    """`[backends.NAME] kind = "openai"`: any OpenAI-compatible endpoint."""

    local: ClassVar[bool] = False

    kind: Literal["openai"] = "openai"
    base_url: HttpUrl | None = Field(default=None, description="The endpoint's root, usually ending in /v1")
    base_urls: tuple[ServerRoot, ...] | None = Field(
        default=None, min_length=1, description="Instead of base_url: the roots of several servers of the same model"
    )
    resolve: Literal["off", "a"] = Field(
        default="off",
        description="`a`: each DNS address of base_url's host is a server; it is looked up again every 5 s",
    )
    probe: bool = Field(
        default=True,
        description="Whether a pool reads its /health and the metrics of vLLM and SGLang; false for hosted APIs",
    )
    model: str | None = Field(default=None, description="Model name sent upstream; unset sends the client's")
    api_key: SecretStr | None = Field(default=None, description="Set it from the environment or api_key_file only")
    api_key_file: str | None = Field(default=None, description="File holding the API key")
    read_timeout: float = Field(default=600.0, gt=0, description="Seconds without a byte from the upstream")
    server_kind: Literal["auto", "vllm", "sglang", "other"] = Field(
        default="auto", description="The server's software; auto recognises vLLM and SGLang"
    )
    allow_fields: tuple[Annotated[str, Field(min_length=1, max_length=128)], ...] = Field(
        default=(),
        description="Fields, types of tools and names in chat_template_kwargs to forward besides the allowed ones",
    )
    allow_media_hosts: tuple[Annotated[str, Field(pattern=_HOST)], ...] = Field(
        default=(), description="Hosts (with :port, if unusual) of images and other media that messages may link to"
    )
    shared_upstream: bool = Field(
        default=False,
        description="Let all tenants share the upstream's prefix cache: requests have no salt. Needed with several"
        " tenants if the upstream is neither vLLM nor SGLang",
    )
    system_messages: Literal["anywhere", "first"] = Field(
        default="anywhere",
        description="`first`: the upstream accepts a system message only as the first; later ones get the role user",
    )
    priority: Literal["off", "auto", "lowest_first", "highest_first"] = Field(
        default="off",
        description="Let clients send `priority` (0: first) to a server that schedules by it: which value the server"
        " serves first; auto: by its software",
    )

    @property
    def url(self) -> HttpUrl:
        assert self.base_url is not None, "several servers have no single address"
        return self.base_url

    def for_server(self, url: HttpUrl) -> Self:
        return self.model_copy(update={"base_url": url, "base_urls": None, "resolve": "off"})

    @property
    def has_several_servers(self) -> bool:
        return self.base_url is None or self.resolve != "off"

    @model_validator(mode="after")
    def _one_way_to_servers(self) -> Self:
        if self.base_url is None and self.base_urls is None:
            raise ValueError("base_url is missing: set it, or base_urls for several servers")
        if self.base_url is not None and self.base_urls is not None:
            raise ValueError("set one of base_url and base_urls: each says which servers there are")
        if self.resolve != "off" and self.base_url is None:
            raise ValueError(f'resolve = "{self.resolve}" looks up the host of base_url, which is not set')
        roots = [(url.scheme, url.host, url.port, url.path) for url in self.base_urls or ()]  # of any user
        for _, host, port, path in (root for root in roots if roots.count(root) > 1):
            raise ValueError(f"base_urls names {host}:{port}{path} twice")
        return self


class EncoderSettings(SettingsModel):
    """`[backends.NAME] kind = "encoder"`: an embedding model in this process."""

    local: ClassVar[bool] = True
    has_several_servers: ClassVar[bool] = False

    kind: Literal["encoder"] = "encoder"
    model: str = Field(default="minilm", description="Embedding model: built-in name, folder or model-hub id")
    device: str = Field(default="auto", description="Device to run it on; auto takes the fastest there is")


BackendSettings = Annotated[TorchSettings | OpenAISettings | EncoderSettings, Field(discriminator="kind")]


class FleetSettings(SettingsModel):
    """`[fleet]`: how the servers of pools are watched, and when a call is tried again."""

    failures: int = Field(default=5, ge=1, description="Failures that open a server's circuit breaker")
    open_seconds: float = Field(
        default=10.0, gt=0, description="Seconds before an open circuit breaker allows one trial"
    )
    max_retries: int = Field(default=2, ge=0, le=10, description="Retries of a call whose answer has not begun")


@dataclass(frozen=True, slots=True)
class PoolTarget:
    """A part of a pool: the servers of the backend `backend`, asked for `model`; None leaves the name as it is."""

    backend: str
    model: str | None


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """A pool to build: where its calls go, and by which policy."""

    name: str
    targets: tuple[PoolTarget, ...]
    placement: str


def read_secret(path: Path | str | None, name: str = "the key file") -> str:
    """The text of a key file without surrounding blanks. Raises `ConfigurationError` if it cannot be read."""
    try:
        return Path(path or "").expanduser().read_text("utf-8-sig").strip()
    except (OSError, ValueError, RuntimeError) as error:  # the last for the home of an unknown user
        system = getattr(error, "strerror", None) or error
        reason = "it is not UTF-8 text" if isinstance(error, UnicodeError) else system
        raise ConfigurationError(f"cannot read {name} {str(path or '')!r}: {reason}") from None


def sendable(key: str, name: str) -> str:
    """`key`, which goes into a header. Raises `ConfigurationError`, without quoting it, if it cannot."""
    if not key:
        raise ConfigurationError(f"{name} is empty: leave it out if the server wants no key")
    if not (key.isascii() and key.isprintable()):
        raise ConfigurationError(f"{name} must be a single line of printable ASCII characters")
    return key

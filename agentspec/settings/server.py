"""Settings of the gateway."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated, Self

from pydantic import ByteSize, Field, SecretStr, model_validator

from agentspec.backends.key_files import read_secret
from agentspec.errors import ConfigurationError
from agentspec.settings.api_keys import ApiKey
from agentspec.settings.rate_limits import RateLimits
from agentspec.settings_model import SettingsModel
from agentspec.types import DEFAULT_TENANT

MIN_SECRET = 32


class TenantLimits(SettingsModel):
    """`[server.tenants.NAME]`: one tenant's share of the slots for requests."""

    weight: float = Field(default=1.0, gt=0, description="Share of the slots under load")
    max_concurrent: int | None = Field(default=None, ge=1, description="Most slots of this tenant; unset: all")


class ServerSettings(SettingsModel):
    """`[server]`: the gateway."""

    host: str = Field(default="127.0.0.1", description="Address to listen on; loopback unless you say otherwise")
    port: int = Field(default=8700, ge=0, le=65535, description="Port to listen on; 0 takes a free one")
    api_keys: tuple[ApiKey, ...] = Field(
        default=(), description="Keys clients must send; without any, all who reach the port may use it"
    )
    max_body_bytes: ByteSize = Field(default=ByteSize(8 << 20), gt=0, description="Larger request bodies get 413")
    max_messages: int = Field(default=2048, ge=1, description="Most messages a request may carry")
    max_concurrent: int = Field(default=256, ge=1, description="Requests in the whole gateway; further ones wait")
    request_timeout: float = Field(default=600.0, gt=0, description="Seconds a request may take before 504")
    drain_timeout: float = Field(default=30.0, ge=0, description="Seconds running requests get after SIGTERM")
    speculation_object: bool = Field(default=True, description="Add the `speculation` object to answers")

    # Bodies.
    max_body_memory: ByteSize = Field(
        default=ByteSize(256 << 20),
        gt=0,
        description="Memory for all running requests' bodies and, up to half of it, for answers above 64 KiB that are"
        " kept to be sent or stored whole; half of either for one tenant. A body beyond it gets 429; an answer waits,"
        " then gets 503",
    )
    max_output_tokens: int = Field(
        default=131072, ge=1, description="Most tokens (max_tokens and its other names) asked of an upstream"
    )

    # Admission.
    queue_timeout: float = Field(
        default=2.0, ge=0, description="Seconds a request may wait for a slot before 429; 0: not at all"
    )
    max_queued: int = Field(default=256, ge=0, description="Requests of one tenant that may wait; one more gets 429")
    tenants: dict[str, TenantLimits] = Field(default_factory=dict, description="Tables [server.tenants.NAME]")

    # Connections.
    allowed_hosts: tuple[str, ...] = Field(
        default=(),
        description='Names clients may send as Host besides loopback and `host`; "*.example.com" for all below, "*" for'
        " any. Unset, any is answered with api_keys; without, web pages under other names are refused",
    )
    tls_cert_file: Path | None = Field(default=None, description="PEM certificate chain; set, HTTPS is served")
    tls_key_file: Path | None = Field(default=None, description="Its private key; unset, it is in tls_cert_file")
    max_connections: int = Field(
        default=4096, ge=1, description="Connections in all; fewer where the process may not open that many files"
    )
    header_timeout: float = Field(default=10.0, gt=0, description="Seconds for a complete head, TLS handshake apart")
    write_timeout: float = Field(
        default=30.0, gt=0, description="Seconds a client may take nothing of its answer before it is cut off"
    )

    # Upstreams.
    secret: SecretStr | None = Field(
        default=None,
        description="Secret of the salts that keep tenants apart in upstreams, 32 characters or more; set it from the"
        " environment or secret_file only. Unset makes a new one at each start, and upstreams' prefix caches begin"
        " anew; gateways with the same secret share them",
    )
    secret_file: Path | None = Field(default=None, description="File holding the secret")
    extra_routes: tuple[Annotated[str, Field(pattern=r"^(/[A-Za-z0-9_-][A-Za-z0-9_.-]*){1,8}$")], ...] = Field(
        default=(), description="Further routes to pass to the only upstream: POST with a JSON body, such as /v1/rerank"
    )

    @model_validator(mode="after")
    def _tenants_fit(self) -> Self:
        known = dict.fromkeys([*(key.tenant for key in self.api_keys), DEFAULT_TENANT])
        if unknown := [name for name in self.tenants if name not in known]:
            raise ValueError(f"server.tenants.{unknown[0]} is the tenant of no API key; known: {', '.join(known)}")
        return self

    @model_validator(mode="after")
    def _limits_fit_keys(self) -> Self:
        known: dict[tuple[str, str], ApiKey] = {}
        for key in (one for one in self.api_keys if one.role == "tenant"):
            if (other := known.setdefault((key.tenant, key.label), key)).own_limits != key.own_limits:
                raise ValueError(
                    f"keys of tenant {key.tenant!r} named {key.label!r} count as one and have different limits:"
                    f" set the same, or another name ({_differing(other, key)})"
                )
        return self

    @model_validator(mode="after")
    def _key_has_certificate(self) -> Self:
        if self.tls_key_file is not None and self.tls_cert_file is None:
            raise ValueError("tls_key_file needs tls_cert_file beside it")
        return self

    @property
    def limits_of_keys(self) -> dict[tuple[str, str], RateLimits]:
        """The limits of each tenant's keys, by tenant and label; keys without limits are not in it."""
        tenants = (key for key in self.api_keys if key.role == "tenant")
        return {(key.tenant, key.label): key.own_limits for key in tenants if not key.unlimited}

    @property
    def tenant_names(self) -> frozenset[str]:
        """The tenants that have a key."""
        return frozenset(key.tenant for key in self.api_keys if key.role == "tenant")

    def read_secret(self) -> bytes:
        """The secret, a random one if none is set. Raises `ConfigurationError` for a short one."""
        if self.secret is None and self.secret_file is None:
            return secrets.token_bytes(32)
        given = read_secret(self.secret_file) if self.secret is None else self.secret.get_secret_value().strip()
        if len(given) < MIN_SECRET:
            raise ConfigurationError(f"server.secret must have {MIN_SECRET} characters or more: openssl rand -hex 32")
        return given.encode()


def _differing(one: RateLimits, other: RateLimits) -> str:
    return ", ".join(name for name in RateLimits.model_fields if getattr(one, name) != getattr(other, name))

"""Settings of the gateway."""

from __future__ import annotations

import secrets
from pathlib import Path

from pydantic import BaseModel, ByteSize, ConfigDict, Field, SecretStr

from agentspec.errors import ConfigurationError
from agentspec.settings.api_keys import ApiKey, read_secret

MIN_SECRET = 32


class ServerSettings(BaseModel):
    """`[server]`: the gateway."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field(default="127.0.0.1", description="Address to listen on; loopback unless you say otherwise")
    port: int = Field(default=8700, ge=0, le=65535, description="Port to listen on; 0 takes a free one")
    api_keys: tuple[ApiKey, ...] = Field(default=(), description="Keys clients must send; none leaves the door open")
    max_body_bytes: ByteSize = Field(default=ByteSize(8 << 20), gt=0, description="Larger request bodies get 413")
    max_messages: int = Field(default=2048, ge=1, description="Most messages a request may carry")
    max_concurrent: int = Field(default=256, ge=1, description="Requests in the whole gateway; one more gets 429")
    request_timeout: float = Field(default=600.0, gt=0, description="Seconds a request may take before 504")
    drain_timeout: float = Field(default=30.0, ge=0, description="Seconds running requests get after SIGTERM")
    speculation_object: bool = Field(default=True, description="Add the `speculation` object to answers")
    secret: SecretStr | None = Field(
        default=None,
        description="Secret of the salts that keep tenants apart in upstreams, 32 characters or more; set it from the"
        " environment or secret_file only. Unset makes a new one at each start, and upstreams' prefix caches begin"
        " anew; gateways with the same secret share them",
    )
    secret_file: Path | None = Field(default=None, description="File holding the secret")

    @property
    def tenant_names(self) -> frozenset[str]:
        """The tenants that have a key."""
        return frozenset(key.tenant for key in self.api_keys)

    def read_secret(self) -> bytes:
        """The secret, a random one if none is set. Raises `ConfigurationError` for a short one."""
        if self.secret is None and self.secret_file is None:
            return secrets.token_bytes(32)
        given = read_secret(self.secret_file) if self.secret is None else self.secret.get_secret_value().strip()
        if len(given) < MIN_SECRET:
            raise ConfigurationError(f"server.secret must have {MIN_SECRET} characters or more: openssl rand -hex 32")
        return given.encode()

"""Settings of the gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import BaseModel, ByteSize, ConfigDict, Field, model_validator

from agentspec.settings.api_keys import ApiKey


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
    max_connections_per_address: int = Field(
        default=2048, ge=1, description="Connections of one client address (of IPv6 one /64); a proxy is one client"
    )
    max_header_bytes: ByteSize = Field(default=ByteSize(32 << 10), ge=1024, description="Larger heads get 431")
    header_timeout: float = Field(default=10.0, gt=0, description="Seconds for a complete head, TLS handshake apart")
    min_body_rate: ByteSize = Field(
        default=ByteSize(1 << 10), ge=0, description="Bytes a second that a body must bring, or it gets 408"
    )
    body_rate_window: float = Field(default=10.0, gt=0, description="Seconds over which min_body_rate is averaged")
    keep_alive_timeout: float = Field(default=75.0, gt=0, description="Seconds before an idle connection is closed")
    write_timeout: float = Field(
        default=30.0, gt=0, description="Seconds a client may take nothing of its answer before it is cut off"
    )

    @model_validator(mode="after")
    def _key_has_certificate(self) -> Self:
        if self.tls_key_file is not None and self.tls_cert_file is None:
            raise ValueError("tls_key_file needs tls_cert_file beside it")
        return self

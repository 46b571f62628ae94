"""Settings of the gateway."""

from __future__ import annotations

from pydantic import BaseModel, ByteSize, ConfigDict, Field

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
    max_body_memory: ByteSize = Field(
        default=ByteSize(256 << 20),
        gt=0,
        description="Memory for the bodies of all running requests, half of it for one tenant; beyond it, 429",
    )
    parsing_threads: int = Field(
        default=2, ge=1, description="Threads that read bodies above 64 KiB; one tenant never takes the last"
    )
    max_choices: int = Field(default=8, ge=1, description="Most answers (n, best_of) to one prompt from an upstream")
    max_output_tokens: int = Field(
        default=131072, ge=1, description="Most tokens (max_tokens and its other names) asked of an upstream"
    )
    max_logprobs: int = Field(default=20, ge=0, description="Most alternatives per token asked of an upstream")
    max_prompts: int = Field(
        default=64, ge=1, description="Most answers to all prompts of one text completion by an upstream"
    )
    max_embedding_inputs: int = Field(default=2048, ge=1, description="Most texts in one request for embeddings")
    max_tools: int = Field(default=128, ge=0, description="Most tools in a request to an upstream")

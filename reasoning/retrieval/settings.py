"""Settings of iterative retrieval: what an answer is, and how it is computed."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field


class RetrievalSettings(BaseModel):
    """The first four determine the answer. All others only change how fast it comes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    round_tokens: int = Field(default=4, ge=1, description="Tokens generated from one document: k of the paper")
    query_tokens: int = Field(default=32, ge=1, description="Last tokens whose text is the query: q of the paper")
    document_tokens: int = Field(default=256, ge=1, description="Most tokens of a document that the model reads")
    max_tokens: int = Field(default=256, ge=1, description="Answer length where a request names none")
    stride: Literal["os3"] | int = Field(
        default="os3", description="Documents guessed before a verification: os3 adapts, down to none; or a number"
    )
    asynchronous: bool = Field(default=True, description="Generate on while documents are verified, where that pays")
    prefetch: int = Field(default=20, ge=1, description="Documents a search brings into the cache: P of the paper")
    cache_bytes: ByteSize = Field(default=ByteSize(4 << 20), ge=0, description="Memory for cached documents")
    search_timeout: float = Field(default=30.0, gt=0, description="Seconds that one search may take")

    @property
    def answer_settings(self) -> dict[str, Any]:
        """What the answer depends on."""
        return {name: getattr(self, name) for name in ("round_tokens", "query_tokens", "document_tokens")}

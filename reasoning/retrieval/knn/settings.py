"""Settings of KNN-LM: what is mixed, which changes answers, and how it is speculated on, which does not."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class KnnSettings(BaseModel):
    """`weight`, `temperature` and `neighbours` determine what is generated; the others only how fast."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    neighbours: int = Field(default=16, ge=1, le=1024, description="Nearest entries that share p_knn: k")
    weight: float = Field(default=0.25, gt=0, lt=1, description="Share of p_knn in the mixture: lambda")
    temperature: float = Field(
        default=100.0, gt=0, description="Squared distance that makes an entry count e times less"
    )
    prefetch: int = Field(default=10, ge=0, le=1024, description="Entries behind each one found that are cached: n")
    stride: Literal["os3"] | int = Field(
        default="os3", description="Queries gathered for one search of the datastore; os3 adapts to what pays"
    )
    bound: bool = Field(default=True, description="Ask for no neighbours where they cannot change a greedy token")

"""Settings of the strategies, composed into the application's settings: `[models.NAME]` tables with a `strategy`,
`[knowledge.NAME]` and `[traces]`.

To add a strategy, write a settings class here, list it in `STRATEGIES`, and let it name the module that implements it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, HttpUrl, SecretStr, model_validator

from agentspec.settings_model import SettingsModel
from agentspec.types import LossyAcceptance

Words = tuple[Annotated[str, Field(min_length=1)], ...]
UserPath = Annotated[Path, AfterValidator(Path.expanduser)]


class StrategySettings(SettingsModel):
    """Settings of every strategy. If `lossy`, answers may differ from those the models give without the strategy."""

    lossy: ClassVar[bool] = True
    implementation: ClassVar[str]
    """`module:class` of the `Strategy` class, imported when a model with this strategy is opened."""
    if TYPE_CHECKING:
        strategy: Any  # its name: a `Literal` in each class

    base: str = Field(description="The large model: a [models.NAME] or [backends.NAME] table")

    @property
    def answer_settings(self) -> dict[str, Any]:
        """The settings that the answer depends on; every answer reports them."""
        return {}

    @property
    def summary(self) -> str:
        """The strategy and its `answer_settings` in one line, for a header."""
        listed = [f"{name}={str(value).lower()}" for name, value in self.answer_settings.items()]
        return "; ".join((self.strategy, *listed))

    @property
    def models(self) -> dict[str, str]:
        """The models that these settings name, by role."""
        named = {role: getattr(self, role, None) for role in ("base", "small", "judge")}
        return {role: name for role, name in named.items() if name is not None}

    @property
    def knowledge_bases(self) -> dict[str, str]:
        """The [knowledge.NAME] tables that these settings name, by the setting that names them."""
        return {}


class DelegationSettings(StrategySettings):
    """Settings of all strategies that delegate steps of thinking. These strategies trade quality for speed."""

    implementation = "agentspec.reasoning.delegation.backend:DelegationBackend"
    algorithm: ClassVar[str]
    """The module whose `ALGORITHM` runs the thinking."""

    small: str = Field(description="The small model, likewise")
    think_start: str = Field(default="<think>\n", description="Opens the thinking, unless the prompt ends with it")
    think_end: str = Field(default="</think>", description="The mark with which a model closes its thinking")
    answer_by: Literal["base", "small"] = Field(default="base", description="The model that answers after the thinking")
    answer_marks: Words = Field(default=(), description="A step that holds one of these is the last")
    step_tokens: int = Field(default=512, ge=1, description="Most tokens of one step")
    budget_tokens: int = Field(default=32768, ge=1, description="Most tokens of thinking that stay")
    spend_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Tokens of thinking generated, dropped ones too, after which the base model thinks on alone;"
        " unset: eight times budget_tokens, and for lookahead 3 depth + 2 times where that is more",
    )
    temperature: float = Field(default=0.6, ge=0, le=2, description="Of the thinking, where a request sets none")
    top_p: float = Field(default=0.95, gt=0, le=1, description="Of the thinking, where a request sets none")
    call_timeout: float = Field(default=120.0, gt=0, description="Seconds that a step or a verdict of a model may take")

    ends_on_repeat: ClassVar[bool] = False
    """Whether two equal steps in a row end the thinking."""

    @property
    def most_spent(self) -> int:
        """`spend_tokens`, or its default: more than a run spends whose drafts are about as long as what is kept."""
        return self.spend_factor * self.budget_tokens if self.spend_tokens is None else self.spend_tokens

    @property
    def spend_factor(self) -> int:
        return 8  # twice what a step takes at the most: two drafts, a score, and a step of the base model

    @property
    def shown_nothing(self) -> tuple[str, ...]:
        """Roles whose models are asked questions without the thinking so far."""
        return ()


class SpecReasonSettings(DelegationSettings):
    """`[models.NAME] strategy = "specreason"`: SpecReason (arXiv 2504.07891)."""

    algorithm = "agentspec.reasoning.delegation.spec_reason"
    ends_on_repeat = True
    strategy: Literal["specreason"] = "specreason"
    answer_marks: Words = ("boxed", "Answer:", "ANSWER:")
    budget_tokens: int = Field(default=8192, ge=1)
    judge: str | None = Field(default=None, description="The model that scores the steps; unset: the base model")
    threshold: float = Field(default=7.0, ge=0, description="Score from 0 to 9 that accepts a step; above 9: none")
    score: Literal["greedy", "average"] = Field(
        default="greedy", description="The likeliest digit, or the mean of all digits by their probability"
    )
    first_steps: int = Field(default=0, ge=0, description="Steps that the base model writes at the beginning")
    pipelined: bool = Field(default=True, description="Draft the next step while the last one is scored")

    @property
    def answer_settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("threshold", "score", "first_steps")}


class SpeculativeThinkingSettings(DelegationSettings):
    """`[models.NAME] strategy = "speculative_thinking"`: Speculative Thinking (arXiv 2504.12329)."""

    algorithm = "agentspec.reasoning.delegation.speculative_thinking"
    strategy: Literal["speculative_thinking"] = "speculative_thinking"
    step_tokens: int = Field(default=1024, ge=1)
    small_reasons: bool = Field(default=True, description="False for a small model that was not trained to reason")
    begin_tokens: int = Field(default=100, ge=0, description="Tokens the base model begins with if not small_reasons")
    peek_tokens: int = Field(
        default=20, ge=1, description="Tokens after a blank line that are looked at, across blank lines"
    )
    verify_tokens: int = Field(default=125, ge=1, description="Tokens the base model writes where words verify")
    overload: int = Field(default=15, ge=1, description="Doubts after which the base model checks the whole")
    rescue_tokens: int = Field(default=125, ge=1, description="Tokens of that check")
    choose_large: bool = Field(
        default=True, description="Use the base model's words always; false: only where the two models' moods differ"
    )

    @property
    def answer_settings(self) -> dict[str, Any]:
        return {"small_reasons": self.small_reasons, "choose_large": self.choose_large}


class LookaheadSettings(DelegationSettings):
    """`[models.NAME] strategy = "lookahead"`: Lookahead Reasoning (arXiv 2506.19830)."""

    algorithm = "agentspec.reasoning.delegation.lookahead"
    strategy: Literal["lookahead"] = "lookahead"
    step_tokens: int = Field(default=100, ge=1)
    judge: str | None = Field(default=None, description="The model that compares steps; unset: the base model")
    compare: Literal["judge", "equal"] = Field(default="judge", description="By a model's word, or by the letter")
    depth: int = Field(default=4, ge=0, le=16, description="Steps drafted ahead of the last one that stayed")

    @model_validator(mode="after")
    def _says_how_it_compares(self) -> Self:
        if self.judge is not None and self.compare == "equal":
            raise ValueError('judge concerns compare = "judge": leave it out, or set compare')
        return self

    @property
    def spend_factor(self) -> int:
        return max(8, 3 * self.depth + 2)  # half as much again as `depth` drafts, a verdict and `depth + 1` own steps

    @property
    def shown_nothing(self) -> tuple[str, ...]:
        return ("judge",)

    @property
    def answer_settings(self) -> dict[str, Any]:
        return {"compare": self.compare, "depth": self.depth}


class RetrievalSettings(SettingsModel):
    """`document_tokens` determines the answer, with the paper's lengths of a round and a query. `stride` only changes
    how fast the answer comes.
    """

    document_tokens: int = Field(default=256, ge=1, description="Most tokens of a document that the model reads")
    max_tokens: int = Field(default=256, ge=1, description="Answer length where a request names none")
    stride: Literal["os3"] | Annotated[int, Field(ge=0)] = Field(
        default="os3", description="Documents guessed before a verification: os3 adapts, down to none; or a number"
    )

    @property
    def answer_settings(self) -> dict[str, Any]:
        """The settings that the answer depends on."""
        return {"document_tokens": self.document_tokens}


class RaLMSpecSettings(RetrievalSettings, StrategySettings):
    """`[models.NAME] strategy = "ralmspec"`: iterative retrieval with RaLMSpec (arXiv 2401.14021), lossless."""

    lossy = False
    implementation = "agentspec.reasoning.retrieval.backend:RetrievalBackend"
    strategy: Literal["ralmspec"] = "ralmspec"
    knowledge: str = Field(description="Where documents come from: a [knowledge.NAME] table")

    @property
    def knowledge_bases(self) -> dict[str, str]:
        return {"knowledge": self.knowledge}


class KnnLmSettings(StrategySettings):
    """`[models.NAME] strategy = "knnlm"`: KNN-LM (arXiv 1911.00172), searched as RaLMSpec does, lossless."""

    lossy = False
    implementation = "agentspec.reasoning.retrieval.knn.backend:KnnBackend"
    strategy: Literal["knnlm"] = "knnlm"
    datastore: UserPath = Field(description="Folder that `agentspec knn build` made with the base model, a local one")
    neighbours: int = Field(default=16, ge=1, le=1024, description="Nearest entries that share p_knn: k")
    weight: float = Field(default=0.25, gt=0, lt=1, description="Share of p_knn in the mixture: lambda")
    temperature: float = Field(
        default=100.0, gt=0, description="Squared distance that makes an entry count e times less"
    )

    @property
    def answer_settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("neighbours", "weight", "temperature")}


class LossyAcceptanceSettings(StrategySettings):
    """`[models.NAME] strategy = "lossy_acceptance"`: a local model that also accepts tokens of its draft model which it
    would not have drawn: typical ones (Medusa, arXiv 2401.10774), or those a trained judge finds right (Judge Decoding,
    arXiv 2501.19309).
    """

    implementation = "agentspec.reasoning.lossy_acceptance:LossyAcceptanceBackend"
    strategy: Literal["lossy_acceptance"] = "lossy_acceptance"
    tenants: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        min_length=1, description='Tenants that may get lossy answers; all others get exact ones. ["*"] means all'
    )
    rule: Literal["typical", "judge"] = Field(
        default="typical", description="Accept likely tokens, or those that the layer in judge_head finds right"
    )
    epsilon: float = Field(default=0.09, gt=0, lt=1, description="typical: a probability that is always enough")
    delta: float = Field(
        default=0.3, gt=0, le=1, description="typical: less is enough where the model is unsure, delta * exp(-entropy)"
    )
    threshold: float = Field(default=0.5, gt=0, lt=1, description="judge: the probability to be right that is enough")
    judge_head: UserPath | None = Field(
        default=None, description="judge: a file that `agentspec.benchmarks.judge_training` wrote for the base model"
    )

    @model_validator(mode="after")
    def _belongs_to_its_rule(self) -> Self:
        """Refuses settings that the chosen rule would ignore. Those at their defaults may be written out."""
        others = {"typical": ("threshold", "judge_head"), "judge": ("epsilon", "delta")}[self.rule]
        for name in others:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} does not concern rule = {self.rule!r}: leave it out, or set rule")
        if self.rule == "judge" and self.judge_head is None:
            raise ValueError('rule = "judge" needs judge_head: python -m agentspec.benchmarks.judge_training')
        return self

    @property
    def acceptance(self) -> LossyAcceptance:
        head = None if self.judge_head is None else str(self.judge_head)
        return LossyAcceptance(self.rule, self.epsilon, self.delta, self.threshold, head)

    @property
    def answer_settings(self) -> dict[str, Any]:
        return self.acceptance.knobs

    def admits(self, tenant: str) -> bool:
        """Whether answers to `tenant` may be lossy."""
        return "*" in self.tenants or tenant in self.tenants


class IndexSettings(SettingsModel):
    """`[knowledge.NAME] kind = "index"`: a folder that `agentspec kb build` made."""

    kind: Literal["index"] = "index"
    path: UserPath = Field(description="The folder")
    model: str | None = Field(default=None, description="The embedding model, if it is not where it was when building")


class RemoteSettings(SettingsModel):
    """`[knowledge.NAME] kind = "remote"`: a service that speaks the protocol of docs/retrieval.md."""

    kind: Literal["remote"] = "remote"
    url: HttpUrl = Field(description="The service's root, to which /search is added")
    timeout: float = Field(default=30.0, gt=0, description="Seconds a search may take")
    api_key: SecretStr | None = Field(default=None, description="Set it from the environment or api_key_file only")
    api_key_file: str | None = Field(default=None, description="File holding the API key")


KnowledgeSettings = Annotated[IndexSettings | RemoteSettings, Field(discriminator="kind")]


class TraceSettings(SettingsModel):
    """`[traces]`: where the decisions of strategies are recorded, one trace for each answer."""

    path: Path | None = Field(default=None, description="Folder for traces, which hold prompts; unset: no traces")
    keep: int = Field(default=200, ge=1, description="How many traces stay; the oldest are deleted")


STRATEGIES: dict[str, type[StrategySettings]] = {
    settings.model_fields["strategy"].default: settings
    for settings in (
        SpecReasonSettings,
        SpeculativeThinkingSettings,
        LookaheadSettings,
        RaLMSpecSettings,
        KnnLmSettings,
        LossyAcceptanceSettings,
    )
}

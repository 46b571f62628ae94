"""Settings of the strategies, composed into the application's settings: `[models.NAME]` tables with a `strategy`, and
`[knowledge.NAME]`.

To add a strategy, write a settings class here, list it in `STRATEGIES`, and let it name the module that implements it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, HttpUrl, PrivateAttr, SecretStr

from agentspec.settings_model import SettingsModel

UserPath = Annotated[Path, AfterValidator(Path.expanduser)]


class StrategySettings(SettingsModel):
    """Settings of every strategy. If `lossy`, answers may differ from those the models give without the strategy."""

    lossy: ClassVar[bool] = True
    implementation: ClassVar[str]
    """`module:class` of the `Strategy` class, imported when a model with this strategy is opened."""
    if TYPE_CHECKING:
        strategy: Any  # its name: a `Literal` in each class

    base: str = Field(description="The large model: a [models.NAME] or [backends.NAME] table")

    knobs: ClassVar[tuple[str, ...]] = ()
    """The settings that the answer depends on; every answer reports them."""

    @property
    def answer_settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.knobs}

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


class DelegationSettings(StrategySettings):
    """Settings of all strategies that delegate steps of thinking. These strategies trade quality for speed."""

    implementation = "agentspec.reasoning.delegation.backend:DelegationBackend"
    algorithm: ClassVar[str]
    """`module:function` that runs the thinking."""

    small: str = Field(description="The small model, likewise")
    think_start: str = Field(
        default="<think>\n", description="Text that begins the thinking, unless the prompt ends with it"
    )
    think_end: str = Field(default="</think>", description="Text that ends the thinking")
    step_tokens: int = Field(default=512, ge=1, description="Most tokens of one step")
    budget_tokens: int = Field(default=32768, ge=1, description="Most tokens of the thinking")
    call_timeout: float = Field(default=120.0, gt=0, description="Seconds that a call of a model may take")

    answer_marks: ClassVar[tuple[str, ...]] = ()
    """A step that holds one of these is the last."""
    ends_on_repeat: ClassVar[bool] = False
    """Whether two equal steps in a row end the thinking."""
    shown_nothing: ClassVar[tuple[str, ...]] = ()
    """Roles whose models are asked questions without the thinking so far."""
    _alone: bool = PrivateAttr(default=False)

    @property
    def drafts_nothing(self) -> bool:
        """Whether the base model thinks alone by these settings."""
        return self._alone

    def think_alone(self) -> Self:
        """Let the base model think alone, as a baseline to compare with, and return these settings."""
        self._alone = True
        return self

    @property
    def spend_tokens(self) -> int:
        """Tokens of thinking generated, dropped ones too, after which the base model thinks on alone."""
        return 8 * self.budget_tokens  # twice the most of a step: two drafts, a score, and a step of the base model


class SpecReasonSettings(DelegationSettings):
    """`[models.NAME] strategy = "specreason"`: SpecReason (arXiv 2504.07891)."""

    algorithm = "agentspec.reasoning.delegation.spec_reason:spec_reason"
    knobs = ("threshold",)
    ends_on_repeat = True
    strategy: Literal["specreason"] = "specreason"
    answer_marks = ("boxed", "Answer:", "ANSWER:")
    budget_tokens: int = Field(default=8192, ge=1)
    judge: str | None = Field(default=None, description="The model that scores the steps; unset: the base model")
    threshold: float = Field(
        default=7.0, ge=0, description="Least score (0 to 9) of an accepted step; above 9: none is accepted"
    )

    @property
    def drafts_nothing(self) -> bool:
        return super().drafts_nothing or self.threshold > 9  # not even where a judge answers "10"


class SpeculativeThinkingSettings(DelegationSettings):
    """`[models.NAME] strategy = "speculative_thinking"`: Speculative Thinking (arXiv 2504.12329)."""

    algorithm = "agentspec.reasoning.delegation.speculative_thinking:speculative_thinking"
    knobs = ("small_reasons",)
    strategy: Literal["speculative_thinking"] = "speculative_thinking"
    step_tokens: int = Field(default=1024, ge=1)
    small_reasons: bool = Field(default=True, description="False for a small model that was not trained to reason")

    # The lengths of the paper's program.
    begin_tokens: ClassVar[int] = 100  # that the base model begins with unless `small_reasons`
    peek_tokens: ClassVar[int] = 20  # after a blank line that are looked at, across blank lines
    verify_tokens: ClassVar[int] = 125  # that the base model writes where words verify
    overload: ClassVar[int] = 15  # doubts after which the base model checks the whole
    rescue_tokens: ClassVar[int] = 125  # of that check


class LookaheadSettings(DelegationSettings):
    """`[models.NAME] strategy = "lookahead"`: Lookahead Reasoning (arXiv 2506.19830)."""

    algorithm = "agentspec.reasoning.delegation.lookahead:lookahead"
    knobs = ("depth",)
    shown_nothing = ("judge",)
    strategy: Literal["lookahead"] = "lookahead"
    step_tokens: int = Field(default=100, ge=1)
    judge: str | None = Field(default=None, description="The model that compares steps; unset: the base model")
    depth: int = Field(default=4, ge=0, le=16, description="Steps drafted ahead of the last accepted one")

    @property
    def drafts_nothing(self) -> bool:
        return not self.depth

    @property
    def spend_tokens(self) -> int:
        """Half as much again as `depth` drafts, a verdict and `depth + 1` steps of the base model, if that is more."""
        return max(8, 3 * self.depth + 2) * self.budget_tokens


class RaLMSpecSettings(StrategySettings):
    """`[models.NAME] strategy = "ralmspec"`: iterative retrieval with RaLMSpec (arXiv 2401.14021), lossless."""

    lossy = False
    implementation = "agentspec.reasoning.retrieval.backend:RetrievalBackend"
    knobs = ("document_tokens",)
    strategy: Literal["ralmspec"] = "ralmspec"
    knowledge: str = Field(description="Where documents come from: a [knowledge.NAME] table")
    document_tokens: int = Field(default=256, ge=1, description="Most tokens of a document that the model reads")


class KnnLmSettings(StrategySettings):
    """`[models.NAME] strategy = "knnlm"`: KNN-LM (arXiv 1911.00172), searched as RaLMSpec does, lossless."""

    lossy = False
    implementation = "agentspec.reasoning.retrieval.knn_lm:KnnBackend"
    knobs = ("neighbours", "weight", "temperature")
    strategy: Literal["knnlm"] = "knnlm"
    datastore: UserPath = Field(description="Folder that `agentspec knn build` made with the base model, a local one")
    neighbours: int = Field(default=16, ge=1, le=1024, description="Nearest entries that share p_knn: k")
    weight: float = Field(default=0.25, gt=0, lt=1, description="Share of p_knn in the mixture: lambda")
    temperature: float = Field(
        default=100.0, gt=0, description="Temperature of the softmax over negative squared distances"
    )


class IndexSettings(SettingsModel):
    """`[knowledge.NAME] kind = "index"`: a folder that `agentspec kb build` made."""

    kind: Literal["index"] = "index"
    path: UserPath = Field(description="The folder")


class RemoteSettings(SettingsModel):
    """`[knowledge.NAME] kind = "remote"`: a service that speaks the protocol of docs/retrieval.md."""

    kind: Literal["remote"] = "remote"
    url: HttpUrl = Field(description="The service's root, to which /search is added")
    api_key: SecretStr | None = Field(default=None, description="Set it from the environment or api_key_file only")
    api_key_file: str | None = Field(default=None, description="File holding the API key")


KnowledgeSettings = Annotated[IndexSettings | RemoteSettings, Field(discriminator="kind")]


STRATEGIES: dict[str, type[StrategySettings]] = {
    settings.model_fields["strategy"].default: settings
    for settings in (
        SpecReasonSettings,
        SpeculativeThinkingSettings,
        LookaheadSettings,
        RaLMSpecSettings,
        KnnLmSettings,
    )
}

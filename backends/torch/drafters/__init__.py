"""The local engine's drafters, one per file; `DrafterFactory` opens the configured ones for each answer."""

from agentspec.backends.torch.drafters.base import Drafter, chain_draft, make_draft
from agentspec.backends.torch.drafters.factory import DrafterFactory
from agentspec.backends.torch.drafters.merged import MergedDrafter, merge
from agentspec.backends.torch.drafters.ngram import NgramDrafter
from agentspec.backends.torch.drafters.prediction import PredictionDrafter
from agentspec.backends.torch.drafters.suffix import SuffixDrafter

__all__ = [
    "Drafter",
    "DrafterFactory",
    "MergedDrafter",
    "NgramDrafter",
    "PredictionDrafter",
    "SuffixDrafter",
    "chain_draft",
    "make_draft",
    "merge",
]

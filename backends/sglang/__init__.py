"""The token cache as the drafter of an SGLang server (docs/sglang.md). Only this package imports SGLang."""

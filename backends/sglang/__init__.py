"""The token cache as the drafter of an SGLang server (docs/engines.md). Only this package imports SGLang."""

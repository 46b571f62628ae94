"""The token cache as the drafter of a vLLM server (docs/engines.md). Only this package imports vLLM."""

"""The token cache as the drafter of a vLLM server (docs/vllm.md). Only this package imports vLLM."""

"""Our cache as the drafter of a vLLM server (docs/vllm.md). Nothing outside this package knows vLLM."""

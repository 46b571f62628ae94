"""`agentspec bench vllm-calls`: recorded calls forced on vLLM engines with several drafters, with random weights."""

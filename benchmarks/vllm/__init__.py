"""`agentspec bench vllm`: vLLM servers without drafts, with other drafters and with agentspec's."""

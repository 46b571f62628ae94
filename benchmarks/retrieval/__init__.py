"""`agentspec bench retrieval`: speculative retrieval against sequential retrieval, on one model."""

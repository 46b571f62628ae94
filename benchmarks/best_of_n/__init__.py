"""`agentspec bench best-of-n`: compares drafters on several sampled answers to one question."""

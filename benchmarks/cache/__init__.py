"""`agentspec bench cache`: recorded calls drafted without a model, and what the cache costs in time and bytes."""

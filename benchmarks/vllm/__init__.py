"""`agentspec bench vllm`: recorded calls forced on vLLM engines with several drafters, with random weights."""

SCRIPTED = "ScriptedLlamaForCausalLM"
"""The class in `model.py`, which only vLLM's environment can import."""

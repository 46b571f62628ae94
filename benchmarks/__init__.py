"""Measurements behind `agentspec bench`; imported as `agentspec.benchmarks`."""

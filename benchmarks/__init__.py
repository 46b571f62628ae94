"""The benchmarks that `agentspec bench` runs; imported as `agentspec.benchmarks`."""

"""`agentspec bench gpu`: checks and timings of the local engine on a device, with random weights."""

"""Choosing a strategy's threshold on problems with known answers: what `agentspec reasoning calibrate` runs."""

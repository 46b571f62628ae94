"""Measures a strategy's thresholds on problems with known answers, for `agentspec reasoning calibrate`."""

"""Compares simulated sessions with the same sessions on real servers: `agentspec bench fleet`."""

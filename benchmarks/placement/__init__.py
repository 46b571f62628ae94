"""Simulates a fleet of engines behind a gateway, with the policies that the gateway itself uses."""

"""Sends a client's request to an upstream model, and the upstream's answer back byte for byte."""

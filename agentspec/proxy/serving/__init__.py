"""Serves HTTP: listening, connections and their bounds, TLS, the gateway's start, drain and reload."""

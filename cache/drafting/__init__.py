"""Draft chains for many requests of a server in one call."""

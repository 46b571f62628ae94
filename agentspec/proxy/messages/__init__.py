"""Anthropic's API for local models and strategies, for upstreams that speak it, and by translation for others."""

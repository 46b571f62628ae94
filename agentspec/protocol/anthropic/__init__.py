"""Anthropic's wire format, the Messages API: its requests as chat completions, its answers, events and errors."""

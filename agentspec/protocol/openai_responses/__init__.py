"""OpenAI's Responses API: its requests as chat requests, and answers as its typed events."""

"""Routes that are no API of chats: embeddings, tokens, what is only passed on, and what describes the gateway."""

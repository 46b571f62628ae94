"""Routes that are no API of chats: embeddings, tokens, and what is only passed on."""

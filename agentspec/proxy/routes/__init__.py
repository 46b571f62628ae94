"""Routes beside chats: completions of several prompts, embeddings, tokens, and what is only passed on."""

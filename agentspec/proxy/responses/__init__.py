"""`/v1/responses`: answers of local models, translated and forwarded ones, and those that are stored."""

"""Chat templates: what they are given, and the bounds of what they may do with it."""

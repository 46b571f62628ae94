"""Recorded calls on an SGLang engine, in its environment. SGLang looks here for models."""

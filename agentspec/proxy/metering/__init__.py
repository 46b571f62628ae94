"""Limits on what each API key asks for."""

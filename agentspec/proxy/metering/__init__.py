"""Limits on what each API key asks for, and the count of what it used."""

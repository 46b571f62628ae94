"""Migrations of the sequence database. A change of `cache/schema.py` is a new file in `versions`."""

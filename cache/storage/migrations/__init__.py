"""Migrations of the sequence database. A change of `cache/storage/schema.py` is a new file in `versions`."""

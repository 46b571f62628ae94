"""Mends a database whose pages are damaged."""

"""Audit prepared tables; `rules.py` runs the rules of a kind of request."""

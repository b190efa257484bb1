"""Backbones, which encode the history of a request; see `parts.py`."""

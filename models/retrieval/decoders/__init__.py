"""Decoders, which score the next code of a semantic ID; see `parts.py`."""

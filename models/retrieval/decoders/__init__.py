"""Decoders: what scores the next code of a semantic ID; `parts.py` says what each gives."""

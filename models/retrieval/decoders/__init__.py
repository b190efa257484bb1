"""Decoders: what scores the next code of a semantic ID. One file per decoder; `parts.py` says what each gives."""

"""Backbones: what reads a request's history. One file per backbone; `parts.py` says what each gives."""

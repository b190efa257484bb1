"""The rules of the audit that all kinds of request share; `rules.py` runs them with those of a kind."""

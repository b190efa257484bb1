"""Rules of the audit that all kinds of request share; `rules.py` runs them with the rules of a kind."""

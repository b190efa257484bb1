"""Paired timings: they import everything, and nothing but the command that runs them imports them."""

"""Paired timings. They import all packages, and only their command imports them."""

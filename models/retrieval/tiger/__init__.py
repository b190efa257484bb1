"""TIGER: a T5 encoder and decoder of semantic IDs."""

"""Searching the catalogue: the trie of semantic IDs, beam search, its fast path, and what it is compared with."""

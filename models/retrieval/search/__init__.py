"""Search of the catalogue: the trie of semantic IDs, and beam search in it."""

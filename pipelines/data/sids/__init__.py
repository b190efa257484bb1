"""Semantic IDs of items: texts to embeddings, to codes, to a trie."""

"""Items to semantic IDs: texts to embeddings, to codes, to a trie."""

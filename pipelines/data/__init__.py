"""On Ray: raw logs to events and sequences; items to embeddings, semantic IDs and a trie."""

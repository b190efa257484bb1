"""From item embeddings to semantic IDs."""

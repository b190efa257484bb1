"""Turn raw logs into tables, and items into embeddings and semantic IDs, on Ray."""

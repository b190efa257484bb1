"""Embed texts (jobs.encode) and quantise embeddings to semantic IDs (jobs.tokenize)."""

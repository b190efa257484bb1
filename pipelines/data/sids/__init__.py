"""Compute semantic IDs: embed the texts of items, and quantise the embeddings."""

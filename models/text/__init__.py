"""Text encoders, language models and tables of text embeddings."""

"""Compare MLflow runs in tables and on a page with plots."""

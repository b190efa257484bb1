"""Compare MLflow runs in tables, plots and a page."""

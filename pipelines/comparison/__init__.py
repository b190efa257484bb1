"""MLflow runs side by side: tables, plots, a page."""

"""MLflow runs and tables of semantic IDs side by side: tables, claims of the papers, plots, a page."""

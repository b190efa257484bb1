"""Suggest a mapping file for an unknown log, and preview the first rows of the log."""

"""A first mapping file and a preview for an unknown log."""

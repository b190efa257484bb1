"""Suggestion of a mapping file for an unknown log, and a preview of its first rows."""

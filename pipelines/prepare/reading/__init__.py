"""Readers that turn the files of a raw log into rows with checked columns."""

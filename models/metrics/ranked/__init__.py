"""Metrics of ranked items, a class each; each file of this folder is loaded."""

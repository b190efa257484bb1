"""Checkpoints and tables to metrics, predictions and latency."""

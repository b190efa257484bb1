"""Evaluate checkpoints: metrics, batch inference and speed."""

"""Evaluation of checkpoints: metrics, batch inference and speed."""

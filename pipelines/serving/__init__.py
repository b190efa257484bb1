"""Serve checkpoints: as MLflow models, or by Ray Serve."""

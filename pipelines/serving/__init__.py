"""Serve checkpoints: as MLflow models, by Ray Serve, or as exported programs."""

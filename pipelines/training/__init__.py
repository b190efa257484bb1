"""Ray Train: tables to checkpoints."""

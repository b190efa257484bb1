"""Train models on prepared tables with Ray Train, and write checkpoints."""

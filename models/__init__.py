"""The models, in plain PyTorch: importable and trainable on a machine that has no Ray and no MLflow."""

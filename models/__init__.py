"""Models in plain PyTorch, which can be trained without Ray and MLflow."""

"""Errors, options, files and tables, without PyTorch, Ray and MLflow."""

"""Paired timings of models and decoders, with PyTorch alone: a file for each, on one harness."""

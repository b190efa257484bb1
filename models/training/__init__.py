"""The training loop, optimizers, CUDA graphs and distributed means, in PyTorch only."""

"""The training loop, optimizers, CUDA graphs and distributed means, without Ray."""

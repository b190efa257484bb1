"""Faster inference on a CPU with the same results as the plain code.

The package has C++ kernels, matrix products by oneDNN, T5's encoder without padding,
and the search of SID-MLP. GPUs use `weights.py` without the kernels.
"""

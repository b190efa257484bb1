"""Faster ways to the same results in inference on a CPU, which a reader can leave out: C++ kernels, products by oneDNN,
T5's encoder without padding, the search of SID-MLP. GPUs use `fast.py` and `derived.py` too, without the kernels."""

"""Tokenizers, which turn item embeddings into semantic IDs (SIDs).

`rqkmeans` and `rqvae` train codebooks. `psid` makes codes unique by relaxing the choice
of nearest centroids, `codes` by an extra level. `published` reads SIDs from other work.
The package needs PyTorch and NumPy only.
"""

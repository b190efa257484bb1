"""Tokenizers: item embeddings to semantic ids (SIDs), PyTorch and NumPy only.

`rqkmeans` and `rqvae` train codebooks; `psid` makes their codes unique by relaxing the nearest-centroid choice and
`codes` by an extra level; `published` reads SIDs that others made.
"""

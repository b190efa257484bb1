"""Tokenizers: item embeddings to semantic ids (SIDs), PyTorch and NumPy only.

`residual` holds what they share; `rqkmeans` and `rqvae` train codebooks; `psid` makes their codes unique
by relaxing the nearest-centroid choice and `conflict` by an extra level; `published` reads SIDs that
others made; `measures` says how good a set of codes is.
"""

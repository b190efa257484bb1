"""Timings of decoding, training and preparing. Imports any package but `papers`."""

"""Reproduction of the papers: claims, published figures, scripts and saved runs."""

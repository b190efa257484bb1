"""Retrieval models without gradient training."""

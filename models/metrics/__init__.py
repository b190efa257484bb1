"""Ranking metrics, and metrics per user."""

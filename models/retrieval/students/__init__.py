"""Models that learn from a trained TIGER."""

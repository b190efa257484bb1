"""Paired timings. Benchmarks import any package but `papers`."""

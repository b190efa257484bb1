"""What CUDA graphs need. Nothing here is used on a CPU but `rung`, and graphs by tests."""

"""Neural network layers shared by several model families."""

"""Neural network layers shared by the models of several kinds."""

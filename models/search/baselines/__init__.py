"""Search models that need no gradient training."""

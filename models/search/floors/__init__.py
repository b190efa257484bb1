"""Search models without gradient training."""

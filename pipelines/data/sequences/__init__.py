"""Steps that the sequence builders share."""

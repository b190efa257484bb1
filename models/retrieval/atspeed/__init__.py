"""AtSpeed: speculative beam search."""

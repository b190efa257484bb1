"""Blocks that models of more than one family are made of."""

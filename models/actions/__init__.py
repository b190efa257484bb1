"""Rankers that predict what a user will do with an item, from past items and what the user did with them."""

"""Actions models: predict what a user will do with an item from past behaviours."""

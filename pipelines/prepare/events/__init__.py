"""Build the tables `events` and `items`."""

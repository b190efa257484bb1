"""The tables `events` and `items`."""

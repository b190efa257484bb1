"""Build the table `events` from raw files."""

"""Build the table `items`: the catalogue of a log."""

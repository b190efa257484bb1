"""Build the `sequences` table: steps that all kinds of request share."""

"""Examples of a `sequences` table: columns in memory maps, order, and batches."""

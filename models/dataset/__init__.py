"""Examples of a `sequences` table: memory-mapped columns, the order of an epoch, and batches."""

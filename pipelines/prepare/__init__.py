"""Turn raw logs into tables, in one process or on Ray Data."""

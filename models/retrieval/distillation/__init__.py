"""Students, their teachers and the cache of a teacher's outputs."""

"""LC-Rec, a language model of semantic IDs, and its students."""

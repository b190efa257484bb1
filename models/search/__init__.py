"""Search: which of these candidates will this user click for this query? One file per model."""

"""One file per raw log layout."""

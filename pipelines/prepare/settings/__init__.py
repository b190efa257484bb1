"""Settings of the tables of a raw log, which mapping files and options give."""

"""SID-MLP and SID-MLP++, students of MLPs."""

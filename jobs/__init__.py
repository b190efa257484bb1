"""Command-line entry points, one per verb: `python -m jobs.NAME --help`."""

"""Splits of requests, and units of time."""

SPLITS = ("train", "val", "test")
"""Splits of a table; columns store a split as its index in this tuple."""

MINUTE_MS, HOUR_MS, DAY_MS = 60_000, 3_600_000, 86_400_000

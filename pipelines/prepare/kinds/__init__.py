"""Kinds of request: settings, requests in tables, audit rules and simulated logs."""

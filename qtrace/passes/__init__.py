"""Passes: one a file, each from a traced module to a traced module and a record of what it did."""

"""Fake quantizers: one a file; the file name is the name that configs use."""

"""Roundings and scales that are learned block by block."""

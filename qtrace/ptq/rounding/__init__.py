"""Roundings and scales that `adaround` and `reconstruct` learn block by block."""

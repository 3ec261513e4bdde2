"""Measured time: single kernels for a cost table, and whole files side by side."""

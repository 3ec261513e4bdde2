"""Measures the kernels of a runtime, one by one, for a cost table of this machine."""

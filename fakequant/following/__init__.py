"""Modules without parameters of their own, which follow those of other sites: biases and folded layers."""

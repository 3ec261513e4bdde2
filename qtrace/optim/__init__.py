"""Optimizers on numpy arrays, whose state a checkpoint can store."""

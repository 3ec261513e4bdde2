"""Optimizers on numpy arrays, whose state is easily kept in a checkpoint."""

"""Passes over a graph: what they find, decide and change."""

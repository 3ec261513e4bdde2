"""Sizes that depend on open axes: numbers that a file reads from shapes and computes with."""

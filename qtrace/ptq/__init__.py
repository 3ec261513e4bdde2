"""Post-training algorithms, one a file."""

"""Observers, one a file: what a site has seen, kept so that shards merge exactly, and the range it gives."""

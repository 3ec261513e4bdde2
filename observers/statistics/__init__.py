"""Statistics that merge exactly, and searches over them."""

"""Files that appear whole or not at all: atomic writes, archives and hashes of arrays, checkpoints, locks."""

"""Model files: saved whole, read by a reader that executes nothing a file brings."""

"""The real runtime beside the graph: verify, bisect, and the causes of differences."""

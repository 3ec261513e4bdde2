"""The real runtime compared with the graph: verify, bisect, and the causes of differences."""

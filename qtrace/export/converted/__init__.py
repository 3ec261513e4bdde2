"""The reader of a converted graph that all exporters share, and the views built on it."""

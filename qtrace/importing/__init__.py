"""Ways in for networks of other frameworks: each format is a package that builds a traced module."""

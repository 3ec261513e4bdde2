"""Benchmarks of qtrace: ``python -m benchmarks`` (``make bench``)."""

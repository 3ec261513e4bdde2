"""Collecting the statistics of a prepared graph's sites: engines that run it, and what goes around them."""

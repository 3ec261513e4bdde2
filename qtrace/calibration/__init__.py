"""Calibration: engines that run a prepared graph, statistics of its sites, and parameters from them."""

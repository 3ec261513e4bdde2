"""Modules whose scales follow from other sites: biases and layers with a folded BatchNorm."""

"""Modules whose scales follow from those of other sites: biases and layers with a folded BatchNorm."""

"""Quantized layers as the algorithms read and write them."""

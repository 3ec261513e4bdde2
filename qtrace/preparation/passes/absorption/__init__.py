"""Constant products and sums that become part of the layers around them."""

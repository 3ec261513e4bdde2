"""Placement: which ops run on integers, by the time of the runtime and the noise of rounding."""

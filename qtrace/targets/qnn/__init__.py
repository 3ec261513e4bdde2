"""Qualcomm's QNN."""

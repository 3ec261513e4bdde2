"""Gradients that MegEngine computes slowly on CPU, computed by its faster kernels."""

from __future__ import annotations

from qtrace.gradients.conv import conv2d, plain
from qtrace.gradients.modules import fast_gradients

__all__ = ["conv2d", "fast_gradients", "plain"]

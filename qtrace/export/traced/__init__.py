"""MegEngine: a plain traced module with the quantization parameters on its nodes."""

from qtrace.export.traced.exporter import FORMAT

__all__ = ["FORMAT"]

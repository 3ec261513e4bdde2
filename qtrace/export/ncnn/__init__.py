"""ncnn: an int8 or float net, ``.param`` and ``.bin``."""

from qtrace.export.ncnn.exporter import FORMAT

__all__ = ["FORMAT"]

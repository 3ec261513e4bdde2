"""ncnn: an int8 or float net, ``.param`` and ``.bin``."""

from qtrace.export.ncnn.exporter import FORMAT, find_fixing_layer

__all__ = ["FORMAT", "find_fixing_layer"]

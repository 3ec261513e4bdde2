"""ncnn: an int8 or float net, ``.param`` and ``.bin``."""

from qtrace.export.ncnn.exporter import COMPANIONS, FLOAT_OPTIONS, SUFFIXES, files, find_fixing_layer

__all__ = ["COMPANIONS", "FLOAT_OPTIONS", "SUFFIXES", "files", "find_fixing_layer"]

"""ncnn: an int8 net, ``.param`` and ``.bin``."""

from qtrace.export.ncnn.exporter import COMPANIONS, SUFFIXES, files

__all__ = ["COMPANIONS", "SUFFIXES", "files"]

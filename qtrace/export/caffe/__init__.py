"""Caffe: a float net, ``.prototxt`` and ``.caffemodel``."""

from qtrace.export.caffe.exporter import COMPANIONS, FIXES_SIZES, FLOAT_OPTIONS, SUFFIXES, files

__all__ = ["COMPANIONS", "FIXES_SIZES", "FLOAT_OPTIONS", "SUFFIXES", "files"]

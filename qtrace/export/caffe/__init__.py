"""Caffe: a float net, ``.prototxt`` and ``.caffemodel``."""

from qtrace.export.caffe.exporter import COMPANIONS, FLOAT_OPTIONS, SUFFIXES, files

__all__ = ["COMPANIONS", "FLOAT_OPTIONS", "SUFFIXES", "files"]

"""Caffe: a float net, ``.prototxt`` and ``.caffemodel``."""

from qtrace.export.caffe.exporter import COMPANIONS, SUFFIXES, files

__all__ = ["COMPANIONS", "SUFFIXES", "files"]

"""Caffe: a float net, ``.prototxt`` and ``.caffemodel``."""

from qtrace.export.caffe.exporter import FORMAT

__all__ = ["FORMAT"]

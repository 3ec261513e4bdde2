"""Caffe: a float net, ``.prototxt`` and ``.caffemodel``."""

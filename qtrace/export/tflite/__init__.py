"""TFLite: an int8 file, channels last."""

from qtrace.export.tflite.exporter import SUFFIXES, serialize

__all__ = ["SUFFIXES", "serialize"]

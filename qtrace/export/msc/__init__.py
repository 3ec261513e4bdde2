"""MSCGraph: JSON and prototxt."""

from qtrace.export.msc.exporter import FLOAT_OPTIONS, SUFFIXES, files

__all__ = ["FLOAT_OPTIONS", "SUFFIXES", "files"]

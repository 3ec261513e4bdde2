"""MSCGraph: JSON and prototxt."""

from qtrace.export.msc.exporter import SUFFIXES, files

__all__ = ["SUFFIXES", "files"]

"""MSCGraph: JSON and prototxt."""

from qtrace.export.msc.exporter import FORMAT

__all__ = ["FORMAT"]

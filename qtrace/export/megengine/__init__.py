"""MegEngine: a dump that runs on its own int8 kernels."""

from qtrace.export.megengine.exporter import FORMAT

__all__ = ["FORMAT"]

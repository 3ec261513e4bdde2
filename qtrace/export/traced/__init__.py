"""MegEngine: a plain traced module with the quantization parameters on its nodes."""

from qtrace.export.traced.exporter import RUNS_GRAPH, SUFFIXES, serialize

__all__ = ["RUNS_GRAPH", "SUFFIXES", "serialize"]

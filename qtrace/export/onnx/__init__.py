"""ONNX with QuantizeLinear and DequantizeLinear (QDQ), and in float."""

from qtrace.export.onnx.exporter import FLOAT_OPTIONS, HAS_COMPOSITES, SUFFIXES, files

__all__ = ["FLOAT_OPTIONS", "HAS_COMPOSITES", "SUFFIXES", "files"]

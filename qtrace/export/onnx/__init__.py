"""ONNX with QuantizeLinear and DequantizeLinear (QDQ)."""

from qtrace.export.onnx.exporter import SUFFIXES, files

__all__ = ["SUFFIXES", "files"]

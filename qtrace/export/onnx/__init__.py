"""ONNX with QuantizeLinear and DequantizeLinear (QDQ), and in float."""

from qtrace.export.onnx.exporter import FORMAT

__all__ = ["FORMAT"]

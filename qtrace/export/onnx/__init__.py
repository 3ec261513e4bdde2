"""ONNX with QuantizeLinear and DequantizeLinear (QDQ), and in float.

The format is loaded when it is first used: who computes a part of a graph in onnxruntime writes no file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qtrace.plugins import load_when_used

if TYPE_CHECKING:
    from qtrace.export.onnx.files import FORMAT

__all__ = ["FORMAT"]

load_when_used(__name__, {"qtrace.export.onnx.files": "FORMAT"})

"""Reads scale and zero point from MegEngine's own observers, fake quants and integer types."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from megengine.core.tensor.dtype import is_quantize
from megengine.module import Module
from megengine.module.qat import QATModule
from megengine.quantization.observer import HistogramObserver, MinMaxObserver
from megengine.quantization.utils import QuantMode

from qtrace.errors import SchemeError
from qtrace.scheme import QParams, QScheme

__all__ = ["read_dtype", "read_fake_quant"]

# Name of a quantized type of MegEngine's kernels -> its lowest and highest integer.
_TYPES = {
    "QuantizedS8": (-128, 127),
    "Quantized8Asymm": (0, 255),
    "QuantizedS4": (-8, 7),
    "Quantized4Asymm": (0, 15),
}


def read_fake_quant(module: QATModule, side: str) -> QParams | str:
    """Reads the parameters of a QAT module's weight or activation, as ``quantize`` of MegEngine would.

    Args:
        module: the module.
        side: "weight" or "act".

    Returns:
        The parameters, or a clause that says why there are none.
    """
    observer, fake_quant = getattr(module, f"{side}_observer"), getattr(module, f"{side}_fake_quant")
    source: Module = fake_quant if hasattr(fake_quant, "get_qparams") else observer
    if source is None or not hasattr(source, "get_qparams"):
        return "it has neither an observer nor a fake quant that knows a scale"
    if problem := _unused(source):
        return problem
    qparams = source.get_qparams()
    if qparams is None or qparams.scale is None:
        return f"its {type(source).__name__} was given no scale"
    meta = qparams.dtype_meta if qparams.dtype_meta is not None else source.dtype
    affine = qparams.mode is QuantMode.ASYMMERTIC and qparams.zero_point is not None
    zero = qparams.zero_point.numpy() if affine else np.zeros((), np.float32)
    return _parameters(int(meta.qmin), int(meta.qmax), qparams.scale.numpy(), zero)


def read_dtype(dtype: Any) -> QParams | str:
    """Reads the parameters of a tensor type, such as the type of a quantized layer's result.

    Args:
        dtype: a numpy dtype with MegEngine's metadata, or None.

    Returns:
        The parameters, or a clause that says why there are none.
    """
    if dtype is None or not is_quantize(dtype):
        return "its type has no scale"
    data = dtype.metadata["mgb_dtype"]
    if data["name"] not in _TYPES:
        return f"qtrace has no scheme for its type {data['name']}"
    zero = np.asarray(data.get("zero_point") or 0)
    return _parameters(*_TYPES[data["name"]], np.asarray(data["scale"], np.float32), zero)


def _unused(source: Module) -> str:
    """Returns why the statistics of an observer say nothing; "" if they do."""
    if isinstance(source, MinMaxObserver):
        low, high = float(source.min_val.numpy()), float(source.max_val.numpy())
        empty = isinstance(source, HistogramObserver) and float(source.histogram.numpy()[0]) < 0
        if empty or not (math.isfinite(low) and math.isfinite(high) and low <= high):
            return f"its {type(source).__name__} has seen no finite value"
        if abs(low) == abs(high) == float(np.finfo(np.float32).max):
            return f"its {type(source).__name__} has seen no finite value"
    return ""


def _parameters(qmin: int, qmax: int, scale: np.ndarray, zero_point: np.ndarray) -> QParams | str:
    scheme = _scheme(qmin, qmax, bool(np.any(zero_point != 0)))
    if scheme is None:
        return f"qtrace has no scheme for integers from {qmin} to {qmax}"
    if scale.size != 1 or zero_point.size != 1:
        return f"it has {scale.size} scales, and qtrace takes over one for each tensor"
    zero = float(zero_point.reshape(()))
    if not zero.is_integer():
        return f"its zero point {zero:g} is no integer"
    try:
        return QParams(scheme, np.asarray(scale, np.float32).reshape(()), np.asarray(int(zero)))
    except SchemeError:
        return f"its scale {float(scale.reshape(())):g} and zero point {zero:g} are impossible"


def _scheme(qmin: int, qmax: int, affine: bool) -> QScheme | None:
    """Returns the scheme with these integers; None if there is none."""
    signed = qmin < 0
    bits = qmax.bit_length() + signed
    if not 2 <= bits <= 16:
        return None
    narrow = qmin == (-qmax if signed else 1)
    scheme = QScheme(
        bits=bits,
        signed=signed,
        symmetric=signed and not affine,
        narrow=narrow,
        rounding="half_away",
    )
    return scheme if (scheme.qmin, scheme.qmax) == (qmin, qmax) else None

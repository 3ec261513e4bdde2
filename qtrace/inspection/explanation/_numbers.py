"""The quantization parameters of a prepared or converted model, and how to say them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from qtrace.preparation.annotation import Site
from qtrace.preparation.model import QuantizedModel
from qtrace.scheme import QParams

__all__ = ["describe", "describe_bias", "describe_native", "numbers", "of_site"]


def numbers(model: QuantizedModel) -> dict[str, QParams]:
    """Group -> its parameters, for every group of ``model`` that has been calibrated."""
    return {fq.site: fq.qparams() for fq in model.fake_quants.values() if fq.calibrated}


def describe_native(model: QuantizedModel) -> dict[str, str]:
    """Group -> the layer of MegEngine's own quantization that its scale comes from, in words."""
    scales, native = numbers(model), {}
    for group, own in model.record.native.items():
        trained = group in scales and bool(np.any(scales[group].scale != np.float32(own.scale)))
        native[group] = own.origin + (f", whose scale {own.scale:.4g} was trained on" if trained else "")
    return native


def _range(qparams: QParams) -> tuple[np.ndarray, np.ndarray]:
    scheme, scale = qparams.scheme, qparams.scale.astype(np.float64)
    low, high = (scale * (end - qparams.zero_point) for end in (scheme.qmin, scheme.qmax))
    return low, high


def describe(qparams: QParams) -> str:
    """Scale, zero point and range in words."""
    low, high = _range(qparams)
    zero = qparams.zero_point
    points = f"{zero.min()}" if zero.min() == zero.max() else f"{zero.min()} to {zero.max()}"
    return f"{_scales(qparams.scale)}, zero point {points}, range {low.min():.4g} to {high.max():.4g}"


def _scales(scale: np.ndarray) -> str:
    if scale.size == 1:
        return f"scale {float(scale.reshape(())):.4g}"
    return f"{scale.size} scales from {scale.min():.4g} to {scale.max():.4g}"


def describe_bias(qparams: Mapping[str, QParams], site: Site) -> str:
    """The scale of a bias in words; "" when it is not known."""
    scale = _bias_scale(qparams, site)
    return "" if scale is None else _scales(scale)


def _bias_scale(qparams: Mapping[str, QParams], site: Site) -> np.ndarray | None:
    if site.activation not in qparams or site.weight not in qparams:
        return None
    scale = qparams[site.activation].scale * np.float32(site.factor)
    return np.asarray(scale * qparams[site.weight].scale)


def of_site(qparams: Mapping[str, QParams], site: Site) -> dict[str, Any] | None:
    """The parameters of a site and their range as plain data; None when they are not known."""
    if site.sort == "bias":
        scale = _bias_scale(qparams, site)
        return None if scale is None else {"scale": scale.tolist(), "zero_point": 0}
    if site.group not in qparams:
        return None
    own = qparams[site.group]
    low, high = _range(own)
    span = [float(low.min()), float(high.max())]
    return {"scale": own.scale.tolist(), "zero_point": own.zero_point.tolist(), "range": span}

"""MegEngine's own quantization configs, said in the words of qtrace's."""

from __future__ import annotations

from typing import Any

from megengine.quantization import QConfig as NativeConfig

__all__ = ["describe_equivalent", "is_native"]

# A class of MegEngine's -> the observer of qtrace that chooses as it does.
_OBSERVERS = {
    "MinMaxObserver": "minmax",
    "SyncMinMaxObserver": "minmax",
    "ExponentialMovingAverageObserver": "moving_average",
    "SyncExponentialMovingAverageObserver": "moving_average",
    "HistogramObserver": "kl",
}
_BITS = {"qint8": 8, "qint8_narrow": 8, "qint4": 4, "qint1": 1}


def is_native(value: object) -> bool:
    """Returns whether ``value`` is a config of MegEngine's, such as its ``ema_fakequant_qconfig``."""
    return isinstance(value, NativeConfig)


def describe_equivalent(config: Any) -> dict[str, Any]:
    """Returns the fields of a `QConfig` whose sites are rounded and observed as ``config`` says.

    Args:
        config: a config of MegEngine's; what qtrace has no equal for is left out.
    """
    dtypes = [
        _keywords(observer or fake_quant).get("dtype", "qint8")
        for observer, fake_quant in (
            (config.act_observer, config.act_fake_quant),
            (config.weight_observer, config.weight_fake_quant),
        )
    ]
    bits = [_BITS.get(dtype, 8) for dtype in dtypes]
    learns_thresholds = _class_name(config.weight_fake_quant) == "TQT"
    fields: dict[str, Any] = {
        "backend": "megengine" if bits == [8, 8] and not learns_thresholds else "generic"
    }
    for side, count, dtype in zip(("activation", "weight"), bits, dtypes, strict=True):
        patch: dict[str, Any] = (
            {} if fields["backend"] == "megengine" else {"signed": True, "symmetric": True}
        )
        patch |= {"bits": count} if count != 8 else {}
        patch |= {"narrow": True} if dtype.endswith("_narrow") else {}
        patch |= {"power_of_two": True} if learns_thresholds else {}
        fields |= {side: patch} if patch else {}
    names = zip(("activation", "weight"), (config.act_observer, config.weight_observer), strict=True)
    observers = {side: name for side, part in names if (name := _OBSERVERS.get(_class_name(part)))}
    fields |= {"observers": observers} if observers else {}
    return fields | ({"fakequant": "tqt"} if learns_thresholds else {})


def _keywords(part: Any) -> dict[str, Any]:
    return dict(getattr(part, "keywords", None) or {})


def _class_name(part: Any) -> str:
    return str(getattr(getattr(part, "func", part), "__name__", ""))

"""MegEngine's own quantization configs, said in the words of qtrace's."""

from __future__ import annotations

from typing import Any

from megengine.quantization import QConfig as NativeConfig
from megengine.quantization.utils import QuantMode

from qtrace.config import backends
from qtrace.scheme import QScheme

__all__ = ["describe_equivalent", "is_native"]

# A class of MegEngine's -> the observer or the fake quant of qtrace that does the same.
_OBSERVERS = {
    "MinMaxObserver": "minmax",
    "SyncMinMaxObserver": "minmax",
    "ExponentialMovingAverageObserver": "moving_average",
    "SyncExponentialMovingAverageObserver": "moving_average",
    "HistogramObserver": "mse",
}
_FAKE_QUANTS = {"NoneType": "fixed", "FakeQuantize": "fixed", "TQT": "tqt", "LSQ": "lsq"}


def is_native(value: object) -> bool:
    """Returns whether ``value`` is a config of MegEngine's, such as its ``ema_fakequant_qconfig``."""
    return isinstance(value, NativeConfig)


def describe_equivalent(config: Any) -> tuple[dict[str, Any], list[str]]:
    """Returns the fields of the `QConfig` that rounds and observes as ``config`` does, or nearly so.

    Args:
        config: a config of MegEngine's.

    Returns:
        The fields, and a clause for each part without an equal.
    """
    schemes: dict[str, QScheme] = {}
    observers: dict[str, Any] = {}
    fake_quants: dict[str, str] = {}
    lost: list[str] = []
    parts = {
        "activation": (config.act_observer, config.act_fake_quant),
        "weight": (config.weight_observer, config.weight_fake_quant),
    }
    for side, (make_observer, make_fake_quant) in parts.items():
        observer, fake_quant = (None if make is None else make() for make in (make_observer, make_fake_quant))
        if observer is None and fake_quant is None:
            continue
        kind = type(fake_quant).__name__
        fake_quants[side] = _FAKE_QUANTS.get(kind, "fixed")
        lost += [] if kind in _FAKE_QUANTS else [f"{kind} of {side}s"]
        schemes[side] = _scheme(side, observer, fake_quant, lost)
        observers |= _observer(side, observer, lost)
    learning = set(fake_quants.values()) - {"fixed"}
    fakequant = learning.pop() if len(set(fake_quants.values())) == len(learning) == 1 else "fixed"
    lost += [
        f"{name} of {side}s only" for side, name in fake_quants.items() if name not in ("fixed", fakequant)
    ]
    if fakequant == "tqt":
        schemes = {side: scheme.replace(power_of_two=True) for side, scheme in schemes.items()}
        lost.append("TQT with scales that are no powers of two")
    lost += [] if "weight" in schemes else ["weights in float"]
    int8 = backends.get("megengine").weight
    on_int8 = {side: scheme.replace(narrow=False) for side, scheme in schemes.items() if side == "weight"}
    fields: dict[str, Any] = {
        "backend": "megengine" if {**schemes, **on_int8} == dict.fromkeys(parts, int8) else "generic"
    }
    backend = backends.get(fields["backend"])
    defaults = {"activation": backend.activation.to_dict(), "weight": backend.weight.to_dict()}
    for side, scheme in schemes.items():
        patch = {key: value for key, value in scheme.to_dict().items() if value != defaults[side][key]}
        fields |= {side: patch} if patch else {}
    fields |= {"method": "weight_only"} if [*schemes] == ["weight"] else {}
    fields |= {"observers": observers} if observers else {}
    learned = {"tqt": "tqt", "lsq": {"lsq": {"grad_scale": False}}}
    return fields | ({"fakequant": learned[fakequant]} if fakequant in learned else {}), lost


def _scheme(side: str, observer: Any, fake_quant: Any, lost: list[str]) -> QScheme:
    """Returns the scheme of a side; adds what lacks an equal to ``lost``."""
    dtype = (fake_quant or observer).dtype
    low, high = int(dtype.qmin), int(dtype.qmax)
    signed, affine = low < 0, getattr(observer, "mode", None) is QuantMode.ASYMMERTIC
    scheme = QScheme(
        bits=min(max(high.bit_length() + signed, 2), 16),
        signed=signed,
        symmetric=signed and not affine,
        narrow=signed and low == -high,
        rounding="half_away",
    )
    if (scheme.qmin, scheme.qmax) != (low, high):
        lost.append(f"{side}s with integers from {low} to {high}")
    if not affine and not signed:
        lost.append(f"{side}s whose zero point is 0 whatever they hold")
    elif not affine and not scheme.narrow and observer is not None:
        lost.append(f"the scale of {side}s, the largest value / {(high - low) / 2:g} there, / {high} here")
    return scheme


def _observer(side: str, observer: Any, lost: list[str]) -> dict[str, Any]:
    """Returns the observer of a side, if it has an equal or a near one; adds what lacks one to ``lost``."""
    kind = type(observer).__name__
    if kind not in _OBSERVERS:
        lost.append(f"{side}s without an observer" if observer is None else f"{kind} of {side}s")
        return {}
    name, options = _OBSERVERS[kind], {}
    if name == "mse":
        lost.append(f"the search of HistogramObserver for {side}s")
        options = {"bins": observer.bins}
    elif name == "moving_average":
        options = {"momentum": float(f"{float(observer.momentum.numpy()):g}")}
    return {side: {name: options} if options else name}

"""The short names of precisions, for targets that have them.

``w4a8`` gives the bits of weights and activations, ``w4`` only the bits of weights, and with ``w8a8_dynamic``
the range of activations follows each batch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from qtrace.config import backends
from qtrace.config.backends.base import Backend
from qtrace.errors import ConfigError

__all__ = ["SYMMETRIC", "check_precision", "is_precision", "lacks_zero_points"]

SYMMETRIC = "common/symmetric_activations"
"""The recipe for targets whose activations lack a zero point at some width."""

_NAME = re.compile(r"w(\d+)(?:a(\d+))?(_dynamic)?")


def is_precision(name: object) -> bool:
    """Returns whether ``name`` is the short name of a precision."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def lacks_zero_points(name: str, target: str) -> bool:
    """Returns whether the activations of a target lack a zero point at the width of a precision."""
    bits = _bits(name).get("activation")
    limits = backends.get(target).limits.get("activation")
    return limits is not None and bits in limits.symmetric_bits


def check_precision(names: Sequence[str], target: str) -> None:
    """Refuses a precision that a target lacks.

    Args:
        names: the parts of a recipe's name; those that are no precision are left out.
        target: the name of the target.

    Raises:
        ConfigError: naming the bits that the target has.
    """
    backend = backends.get(target)
    for name in filter(is_precision, names):
        _check_method(name, backend, target)
        for sort, bits in _bits(name).items():
            limits = backend.limits.get(sort)
            if limits is not None and bits not in limits.bits:
                raise ConfigError(
                    f"{target} lacks {name}: it runs weights of {_written(backend, 'weight')} bits and "
                    f"activations of {_written(backend, 'activation')} bits."
                )


def _check_method(name: str, backend: Backend, target: str) -> None:
    match = _NAME.fullmatch(name)
    assert match is not None
    method = "dynamic" if match[3] else "static" if match[2] else "weight_only"
    if method != "static" and not backend.kinds_of(method):
        able = [known for known in backends.known() if backends.get(known).kinds_of(method)]
        raise ConfigError(
            f"{target} lacks {name}: quantizing by method {method} is for {' and '.join(able)}; choose a "
            "precision of weights and activations, such as w8a8."
        )


def _bits(name: str) -> dict[str, int]:
    match = _NAME.fullmatch(name)
    assert match is not None
    bits = {"weight": int(match[1])}
    if match[2] and not match[3]:
        bits["activation"] = int(match[2])
    return bits


def _written(backend: Backend, sort: str) -> str:
    widths = [str(bits) for bits in _widths(backend, sort)]
    return " or ".join(filter(None, [", ".join(widths[:-1]), widths[-1]]))


def _widths(backend: Backend, sort: str) -> Iterable[int]:
    return backend.limits[sort].bits

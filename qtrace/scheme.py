"""The scheme (`QScheme`) and the parameters (`QParams`) of a quantized tensor: frozen data, exact in JSON."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from qtrace.errors import SchemeError

Rounding = Literal["half_even", "half_away", "half_up"]

_ROUNDINGS: tuple[str, ...] = get_args(Rounding)
_FLAGS = ("signed", "symmetric", "narrow", "power_of_two")


@dataclass(frozen=True)
class QScheme:
    """Maps real numbers x to integers q: ``x = (q - zero_point) * scale``. Hashable, without arrays.

    Attributes:
        bits: width of q, 2 to 16.
        signed: q is a two's complement integer rather than an unsigned one.
        symmetric: the zero point is fixed: 0 when signed, ``2**(bits-1)`` when not.
        narrow: the lowest q is not used, so that a signed range is symmetric around 0.
        axis: the axis of the channels that have a scale each (negative counts from the end), or None for
            one scale per tensor.
        power_of_two: scales are powers of two (targets that shift instead of multiplying).
        rounding: the rule for ties: to the even neighbour (ONNX, TFLite), away from zero (MegEngine, ncnn),
            or up (ESP32-S3).
        block: the number of neighbours along the inputs of a channel that share a scale, for a weight with
            the axes (outputs, inputs). None is one scale for the whole channel.

    Raises:
        SchemeError: when a value is not allowed.
    """

    bits: int = 8
    signed: bool = False
    symmetric: bool = False
    narrow: bool = False
    axis: int | None = None
    power_of_two: bool = False
    rounding: Rounding = "half_even"
    block: int | None = None

    def __post_init__(self) -> None:
        bits = _integer("bits", self.bits)
        if not 2 <= bits <= 16:
            raise SchemeError(f"QScheme: bits is {bits}: choose 2 to 16.")
        object.__setattr__(self, "bits", bits)
        if self.axis is not None:
            object.__setattr__(self, "axis", _integer("axis", self.axis))
        if self.block is not None:
            object.__setattr__(self, "block", _integer("block", self.block))
            if self.block < 2:
                raise SchemeError(f"QScheme: block is {self.block}: choose 2 or more values per scale.")
            if self.axis is None:
                raise SchemeError(
                    "QScheme: a block is a part of a channel: give the axis of the channels, too."
                )
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise SchemeError(f"QScheme: {name} is {getattr(self, name)!r}: choose True or False.")
        if self.rounding not in _ROUNDINGS:
            raise SchemeError(f"QScheme: rounding is {self.rounding!r}: choose {' or '.join(_ROUNDINGS)}.")

    @property
    def qmin(self) -> int:
        """The smallest integer in use."""
        return (-(1 << (self.bits - 1)) if self.signed else 0) + self.narrow

    @property
    def qmax(self) -> int:
        """The largest integer in use."""
        return (1 << (self.bits - self.signed)) - 1

    @property
    def symmetric_zero_point(self) -> int:
        """The integer that stands for 0.0 when the scheme is symmetric."""
        return 0 if self.signed else 1 << (self.bits - 1)

    @property
    def per_channel(self) -> bool:
        """Whether every channel has its own scale and zero point."""
        return self.axis is not None

    def to_dict(self) -> dict[str, Any]:
        """All attributes by name, fit for JSON; a block only if there is one."""
        data = dataclasses.asdict(self)
        if self.block is None:  # as in schemes of before there were blocks, whose hashes stay
            del data["block"]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> QScheme:
        """The inverse of `to_dict`; what is not given takes its default.

        Raises:
            SchemeError: for a key or a value that is not known.
        """
        _known_keys("QScheme", data, tuple(field.name for field in dataclasses.fields(cls)))
        return cls(**data)

    @property
    def of_rows(self) -> QScheme:
        """The scheme of the same tensor as rows that have a scale each, (channels, rest) or blocks."""
        return dataclasses.replace(self, axis=0, block=None)

    def replace(self, **changes: Any) -> QScheme:
        """A copy with other values; `SchemeError` for unknown names and bad values."""
        return QScheme.from_dict({**self.to_dict(), **changes})

    def describe(self) -> str:
        """A short text such as ``uint8 affine`` or ``int8 sym per-channel(0) narrow``."""
        words = [f"{'int' if self.signed else 'uint'}{self.bits}", "sym" if self.symmetric else "affine"]
        if self.per_channel:
            words.append(f"per-channel({self.axis})")
        if self.block is not None:
            words.append(f"blocks of {self.block}")
        if self.narrow:
            words.append("narrow")
        if self.power_of_two:
            words.append("pow2")
        if self.rounding != "half_even":
            words.append(self.rounding.replace("_", "-"))
        return " ".join(words)


@dataclass(frozen=True, eq=False)
class QParams:
    """A scheme with its scale and zero point: ``x = (q - zero_point) * scale``.

    The arrays are converted, checked and kept as read-only copies. Two QParams are equal when their
    schemes and the bits of their arrays are equal.

    Attributes:
        scheme: the scheme of the tensor.
        scale: float32, finite and positive, of shape ``()`` per tensor or ``(C,)`` per channel; with blocks
            the scales of the first channel come first.
        zero_point: int32 in ``[qmin, qmax]``, of the shape of `scale`.

    Raises:
        SchemeError: when the numbers are impossible or do not fit the scheme.
    """

    scheme: QScheme
    scale: np.ndarray
    zero_point: np.ndarray

    def __post_init__(self) -> None:
        if not isinstance(self.scheme, QScheme):
            raise SchemeError(f"QParams: scheme is {self.scheme!r}: give a QScheme.")
        scale = _scale_array(self.scheme, self.scale)
        zero_point = _zero_point_array(self.scheme, self.zero_point)
        if scale.shape != zero_point.shape:
            raise SchemeError(
                f"QParams: scale has shape {scale.shape} and zero_point {zero_point.shape}: give one of each "
                "per channel."
            )
        if self.scheme.per_channel != (scale.ndim == 1) or not scale.size:
            shape = "(channels,)" if self.scheme.per_channel else "()"
            raise SchemeError(
                f"QParams: scale has shape {scale.shape}, but {self.scheme.describe()} takes {shape}."
            )
        for name, array in (("scale", scale), ("zero_point", zero_point)):
            array.setflags(write=False)
            object.__setattr__(self, name, array)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, QParams):
            return NotImplemented
        return self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def __reduce__(self) -> tuple[Any, ...]:
        # The constructor makes the arrays read-only: numpy drops that flag in pickles and deep copies.
        return QParams, (self.scheme, self.scale, self.zero_point)

    def _identity(self) -> tuple[QScheme, tuple[int, ...], bytes, bytes]:
        return self.scheme, self.scale.shape, self.scale.tobytes(), self.zero_point.tobytes()

    def to_dict(self) -> dict[str, Any]:
        """Returns scheme, scale and zero point as plain numbers or lists, which JSON keeps bit for bit."""
        return {
            "scheme": self.scheme.to_dict(),
            "scale": self.scale.tolist(),
            "zero_point": self.zero_point.tolist(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> QParams:
        """The inverse of `to_dict`.

        Raises:
            SchemeError: for a missing or an unknown key, and for an impossible value.
        """
        keys = ("scheme", "scale", "zero_point")
        _known_keys("QParams", data, keys)
        for key in keys:
            if key not in data:
                raise SchemeError(f"QParams: {key!r} is missing: give {', '.join(keys)}.")
        return cls(QScheme.from_dict(data["scheme"]), data["scale"], data["zero_point"])


def _scale_array(scheme: QScheme, value: Any) -> np.ndarray:
    """Converts scales to a new float32 array and checks them against `scheme`."""
    numbers = _numbers("scale", value, "iuf")
    with np.errstate(over="ignore", under="ignore"):
        scale = numbers.astype(np.float32)
    bad = ~(np.isfinite(scale) & (scale > 0))
    if bad.any():
        raise SchemeError(f"QParams: scale holds {numbers[bad][0]}: give finite positive float32 numbers.")
    if scheme.power_of_two and (np.frexp(scale)[0] != 0.5).any():
        raise SchemeError(f"QParams: {scheme.describe()} takes scales that are powers of two.")
    return scale


def _zero_point_array(scheme: QScheme, value: Any) -> np.ndarray:
    """Converts zero points to a new int32 array and checks them against `scheme`."""
    numbers = _numbers("zero_point", value, "iu")
    if scheme.symmetric:
        low = high = scheme.symmetric_zero_point
    else:
        low, high = scheme.qmin, scheme.qmax
    bad = (numbers < low) | (numbers > high)
    if bad.any():
        allowed = f"is {low}" if low == high else f"lies in [{low}, {high}]"
        raise SchemeError(
            f"QParams: zero_point holds {numbers[bad][0]}, but for {scheme.describe()} it {allowed}."
        )
    return numbers.astype(np.int32)


def _numbers(name: str, value: Any, kinds: str) -> np.ndarray:
    """Converts `value` to an array whose dtype is of one of `kinds` (numpy's letters)."""
    try:
        array = np.asarray(value)
    except ValueError:  # ragged lists
        array = np.asarray(None)
    if array.dtype.kind not in kinds:
        expected = "numbers" if "f" in kinds else "integers"
        raise SchemeError(f"QParams: {name} is {value!r}: give {expected}.")
    return array


def _integer(name: str, value: Any) -> int:
    """Converts `value` to an int; refuses True and False."""
    if not isinstance(value, (bool, np.bool_)):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise SchemeError(f"QScheme: {name} is {value!r}: give an integer.")


def _known_keys(owner: str, data: Mapping[str, Any], known: tuple[str, ...]) -> None:
    if not isinstance(data, Mapping):
        raise SchemeError(f"{owner}: {data!r} is not a mapping: give {', '.join(known)} by name.")
    for key in data:
        if key not in known:
            raise SchemeError(f"{owner} does not know {key!r}: it knows {', '.join(known)}.")

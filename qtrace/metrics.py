"""Compares values with their reference: the one SQNR of the package, the cosine and equal classes.

All figures are computed from sums in float64. The sums of several batches add up to the sums of all data. The
signal to quantization noise ratio of a reference f and the values q in its place is
``10 log10(E[f**2] / E[(q - f)**2])`` (Jayant and Noll 1984, "Digital Coding of Waveforms").
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from qtrace.errors import QtraceError

__all__ = [
    "ErrorSums",
    "add_fields",
    "comparable",
    "decibels",
    "errors_of",
    "finite_or_none",
    "inner",
    "sqnr_db",
]


if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Sums = TypeVar("_Sums", bound="DataclassInstance")


def decibels(signal: float, noise: float) -> float:
    """Returns ``10 log10(signal / noise)`` of two powers.

    Without noise it is infinite, whatever the signal. Without a signal, or with infinite noise, it is minus
    infinity. It is never NaN.
    """
    if noise == 0.0:
        return math.inf
    if signal == 0.0 or not math.isfinite(noise):
        return -math.inf
    return 10.0 * (math.log10(signal) - math.log10(noise))


def inner(a: np.ndarray, b: np.ndarray) -> float:
    """Returns the inner product of two vectors, the same for any number of threads: BLAS splits long sums.

    Args:
        a: float64 (N,).
        b: float64 (N,).
    """
    return float(np.einsum("i,i->", a, b))


def finite_or_none(ratio: float) -> float | None:
    """Returns `ratio` as reports store it: None where it is infinite."""
    return ratio if math.isfinite(ratio) else None


def finite_values(value: Any) -> Any:
    """Returns plain data for JSON: lists for tuples, and None for numbers that are not finite."""
    if isinstance(value, dict):
        return {key: finite_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_values(item) for item in value]
    return finite_or_none(value) if isinstance(value, float) else value


def add_fields(cls: type[_Sums], sums: Iterable[_Sums]) -> _Sums:
    """Returns the dataclass ``cls`` of sums whose fields are the sums of the fields of ``sums``."""
    parts = list(sums)
    return cls(**{field.name: sum(getattr(part, field.name) for part in parts) for field in fields(cls)})


def errors_of(reference: np.ndarray, test: np.ndarray) -> np.ndarray:
    """Returns ``test - reference`` in float64; equal infinities and NaNs give 0, unequal ones infinity."""
    f, q = reference.astype(np.float64), test.astype(np.float64)
    with np.errstate(invalid="ignore"):
        errors = np.nan_to_num(q - f, nan=np.inf, posinf=np.inf, neginf=-np.inf)
    return np.where((f == q) | (np.isnan(f) & np.isnan(q)), 0.0, errors)


def comparable(reference: np.ndarray, test: np.ndarray) -> bool:
    """Whether an output has an error: its values are floats, and both sides have the same shape."""
    return reference.shape == test.shape and reference.dtype.kind == "f"


def sqnr_db(reference: Any, test: Any) -> float:
    """Computes the signal to quantization noise ratio of `test`, in dB; see `ErrorSums` and `decibels`.

    Args:
        reference: the true values, any shape.
        test: the values in their place, of the same shape.

    Raises:
        QtraceError: when the shapes differ.
    """
    sums = ErrorSums()
    sums.add(np.asarray(reference), np.asarray(test))
    return sums.sqnr_db


@dataclass
class ErrorSums:
    """Sums over a reference f and the values q in its place, in float64; the sums of two sets of batches add.

    Equal values add no noise; this holds for equal infinities and for NaN, which are left out of every sum. A
    value that is finite on one side only, or another infinity, is noise without limit.

    Attributes:
        signal: the sum of ``f**2``.
        power: the sum of ``q**2``.
        product: the sum of ``f * q``.
        noise: the sum of ``(q - f)**2``.
        values: the number of values that were compared.
        classified: the number of samples whose classes were compared.
        agreeing: the number of those samples whose largest value has the same index on both sides.
    """

    signal: float = 0.0
    power: float = 0.0
    product: float = 0.0
    noise: float = 0.0
    values: int = 0
    classified: int = 0
    agreeing: int = 0

    def add(self, reference: np.ndarray, test: np.ndarray, *, classes: bool = False) -> None:
        """Adds two arrays of one batch.

        Args:
            reference: the true values.
            test: the values in their place, of the same shape.
            classes: whether to compare the index of the largest value of each sample, too; arrays without a
                first axis of samples lack it.

        Raises:
            QtraceError: when the shapes differ.
        """
        if reference.shape != test.shape:
            raise QtraceError(f"shapes {reference.shape} and {test.shape} differ: compare like with like.")
        f, q = reference.astype(np.float64).ravel(), test.astype(np.float64).ravel()
        self.values += f.size
        if classes and reference.ndim >= 2 and reference.size:
            rows = (len(reference), -1)
            self.classified += len(reference)
            self.agreeing += int(np.sum(f.reshape(rows).argmax(1) == q.reshape(rows).argmax(1)))
        finite = np.isfinite(f) & np.isfinite(q)
        if not finite.all():
            if not np.array_equal(f[~finite], q[~finite], equal_nan=True):
                self.noise = math.inf
            f, q = f[finite], q[finite]
        self.signal += inner(f, f)
        self.power += inner(q, q)
        self.product += inner(f, q)
        difference = q - f
        self.noise += inner(difference, difference)

    def __add__(self, other: ErrorSums) -> ErrorSums:
        """Merges two sums; commutative, and associative up to the rounding of float64."""
        return add_fields(ErrorSums, (self, other))

    @property
    def sqnr_db(self) -> float:
        """The signal to quantization noise ratio in dB; see `decibels`."""
        return decibels(self.signal, self.noise)

    @property
    def cosine(self) -> float:
        """The cosine of the angle between both, as vectors; 1 where both are 0."""
        norm = math.sqrt(self.signal) * math.sqrt(self.power)
        return self.product / norm if norm else float(self.signal == self.power)

    @property
    def agreement(self) -> float | None:
        """The share of samples with an equal index of the largest value; None if none were compared."""
        return self.agreeing / self.classified if self.classified else None

"""Numpy's part of the rules: arrays, scalars and dtypes of numbers and text, checked before numpy sees them.

Numpy trusts the state in a pickle: a dtype whose flags call its items objects, or an array that is given
new memory while something else still looks at the old, corrupts the process. So nothing half-made is ever
handed out: what a pickle builds in two steps is a ``Pending`` until its state is there, and the flags in
the state are not used.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
from megengine.core._imperative_rt import pybfloat16, pyintb1, pyintb2, pyintb4
from megengine.core.tensor.dtype import bfloat16, intb1, intb2, intb4

from qtrace.graph.files.names import RefusedError, shown

CODES = frozenset("b1 i1 i2 i4 i8 u1 u2 u4 u8 f2 f4 f8 c8 c16".split())  # noqa: SIM905 (shorter than a list)
_LARGEST_SCALE = 3.5e38
_LARGEST_DIM = 2**40
TEXT = re.compile(r"[SU][0-9]{1,4}\Z")
OWN = {pybfloat16: bfloat16, pyintb1: intb1, pyintb2: intb2, pyintb4: intb4}


class Pending:
    """An object that the pickle has begun and that exists only once it has its state."""

    __slots__ = ("_make", "_start")

    def __init__(self, make: Callable[[Any, Any], Any], start: Any = None) -> None:
        self._make, self._start = make, start

    def finish(self, state: Any) -> Any:
        """The object with this state."""
        return self._make(self._start, state)


def start_dtype(*args: Any) -> Pending:
    """Starts the dtype of ``numpy.dtype(code, False, True)`` in a pickle, whose byte order follows later."""
    code = args[0] if len(args) == 3 and all(type(flag) is bool for flag in args[1:]) else None
    if type(code) is str and (code in CODES or TEXT.match(code)):
        return Pending(make_dtype, np.dtype(code))
    if isinstance(code, type) and code in OWN:
        return Pending(make_dtype, OWN[code])
    raise RefusedError(f"it holds data of the numpy dtype {shown(code)}, which is neither a number nor text")


def make_dtype(start: np.dtype, state: Any) -> np.dtype:
    """The dtype with byte order, and with the scale and zero point of a quantized one."""
    known = type(state) is tuple and len(state) in (8, 9) and state[0] in (3, 4) and state[2:5] == (None,) * 3
    if not known or state[1] not in ("<", ">", "|", "="):
        raise RefusedError(f"a numpy dtype in it has the state {shown(state)}")
    if len(state) == 9 and state[8]:
        return np.dtype(start.str, metadata=_metadata(state[8]))
    return start.newbyteorder(">") if state[1] == ">" and start.itemsize > 1 else start


def _metadata(value: Any) -> dict[str, dict[str, Any]]:
    """MegEngine's note on a quantized dtype, rebuilt so that nothing else comes along."""
    note = value.get("mgb_dtype") if type(value) is dict and len(value) == 1 else None
    if type(note) is not dict or not {"name", "scale"} <= set(note) <= {"name", "scale", "zero_point"}:
        raise RefusedError(f"a numpy dtype in it has the metadata {shown(value)}")
    scale, zero_point = note["scale"], note.get("zero_point", 0)
    numbers = type(scale) in (int, float) and 0 <= scale <= _LARGEST_SCALE and type(zero_point) is int
    if type(note["name"]) is not str or not numbers or not 0 <= zero_point < 2**16:
        raise RefusedError(f"a numpy dtype in it has the metadata {shown(value)}")
    return {"mgb_dtype": dict(note)}


def dtype_class(*args: Any) -> type:
    """The class of a dtype that has no name of its own: MegEngine's bfloat16 and low-bit integers."""
    if len(args) != 1 or not isinstance(args[0], type) or args[0] not in OWN:
        raise RefusedError("it asks for the class of a numpy dtype that is not MegEngine's")
    return type(OWN[args[0]])


def start_array(*args: Any) -> Pending:
    """Reads the begin of a pickled array: an empty array of class ndarray."""
    if len(args) != 3 or args[0] is not np.ndarray or type(args[2]) is not bytes:
        raise RefusedError("it begins a numpy array that is no plain ndarray")
    return Pending(make_array)


def make_array(_: None, state: Any) -> np.ndarray:
    """Builds the array of the pickled ``state``: version, shape, dtype, order and bytes."""
    if type(state) is not tuple or len(state) != 5 or state[0] != 1 or type(state[4]) is not bytes:
        raise RefusedError("a numpy array in it has a state that numpy never writes")
    _version, shape, dtype, fortran, raw = state
    _check_array(shape, dtype, len(raw))
    array: np.ndarray = np.ndarray((0,), dtype)
    array.__setstate__((1, shape, dtype, bool(fortran), raw))
    return array


def from_buffer(*args: Any) -> np.ndarray:
    """The array that protocol 5 writes as bytes, dtype, shape and order."""
    if len(args) != 4 or type(args[0]) not in (bytes, bytearray) or args[3] not in ("C", "F"):
        raise RefusedError("a numpy array in it is not bytes, dtype, shape and order")
    raw, dtype, shape, order = args
    _check_array(shape, dtype, len(raw))
    return np.frombuffer(raw, dtype).reshape(shape, order=order)


def _check_array(shape: Any, dtype: Any, size: int) -> None:
    plain = (
        type(shape) is tuple
        and len(shape) <= 32
        and all(type(n) is int and 0 <= n < _LARGEST_DIM for n in shape)
    )
    if not plain or not isinstance(dtype, np.dtype) or dtype.hasobject:
        raise RefusedError("a numpy array in it has no plain shape and dtype")
    if math.prod(shape) * dtype.itemsize != size:
        raise RefusedError(f"a numpy array in it has shape {shape} and {size} bytes")


def make_scalar(*args: Any) -> Any:
    """A numpy scalar from its dtype and bytes."""
    ok = len(args) == 2 and isinstance(args[0], np.dtype) and not args[0].hasobject and type(args[1]) is bytes
    if not ok or len(args[1]) != args[0].itemsize:
        raise RefusedError("a numpy scalar in it is not dtype and bytes")
    try:
        return np.frombuffer(args[1], args[0])[0]
    except SystemError:  # numpy on text of no code point
        raise RefusedError("a numpy scalar in it is no text") from None

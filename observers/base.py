"""The base of all observers: statistics of one site that merge exactly, and the range they give.

Each batch is measured on its own, and states are combined by an associative operation. So one worker,
N workers, and a run that was killed and resumed end in the same state, bit for bit.
"""

from __future__ import annotations

import base64
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field

from qtrace.errors import CalibrationError, ConfigError
from qtrace.numerics import choose
from qtrace.plugins import name_of, resolve
from qtrace.plugins.options import Float, OptionModel, check_options
from qtrace.scheme import QParams, QScheme

__all__ = ["Layout", "MovingObserver", "Observer", "State", "from_dict", "to_dict"]


State = dict[str, np.ndarray]
Layout = dict[str, tuple[type, tuple[str | int, ...]]]

_PACKAGE = "qtrace.observers"


class Observer(ABC):
    """Collects statistics of the values of one site, and chooses the range to quantize.

    A subclass declares its `Options` and the `_layout` of its state. It defines how a batch is measured, how
    two states are combined, and which range a state gives. A state is a dict of arrays that nothing changes.

    Attributes:
        Options: the options: a subclass of `OptionModel` with a field for each.
        largest: the largest magnitude of the last batch that was observed; 0 before.

    Args:
        scheme: the scheme of the site; with a channel axis, every channel has statistics of its own.
        **options: the fields of `Options`.

    Raises:
        ConfigError: when an option is unknown or its value is out of bounds.
    """

    Options: ClassVar[type[OptionModel]] = OptionModel

    def __init__(self, scheme: QScheme, **options: Any) -> None:
        self._scheme = scheme
        self._options: dict[str, Any] = dict(check_options(self.Options, self.name, options))
        self._batches = 0
        self._state: State | None = None
        self.largest = 0.0

    @abstractmethod
    def _layout(self) -> Layout:
        """Maps each array of the state to (dtype, shape); a letter in a shape is a size, "C" the channels."""

    @abstractmethod
    def _measure(self, x: np.ndarray, lo: np.ndarray, hi: np.ndarray, batch: int) -> State:
        """Measures one batch and returns its state.

        Args:
            x: float32, contiguous, finite, of shape (A, C, B) with the channels in the middle.
            lo, hi: float32 of shape (C,): the smallest and the largest value of each channel.
            batch: the batch's index.
        """

    @abstractmethod
    def _combine(self, first: State, second: State) -> State:
        """Merges the states of two sets of batches: associative, exact to the bit."""

    @abstractmethod
    def _choose_range(self, state: State) -> tuple[np.ndarray, np.ndarray]:
        """Chooses the range (lo, hi) to quantize, each of shape (C,)."""

    @property
    def name(self) -> str:
        """The name of this class in configs: its file name, or ``pkg.mod:Class`` outside of qtrace."""
        return name_of(type(self))

    @property
    def scheme(self) -> QScheme:
        """The scheme of the site."""
        return self._scheme

    @property
    def options(self) -> dict[str, Any]:
        """All options with their values."""
        return dict(self._options)

    @property
    def empty(self) -> bool:
        """Whether no batch was observed yet."""
        return self._state is None

    def observe(self, x: np.ndarray, *, batch: int | None = None, site: str = "") -> None:
        """Adds one batch. A batch that is refused changes nothing.

        Args:
            x: floats of any rank, not empty; float64 is rounded to float32, as runtimes compute.
            batch: the batch's index in the whole run; None counts the batches of this observer.
            site: the name of the tensor, for errors.

        Raises:
            CalibrationError: when x is empty or holds no finite floats, or when its channels do not fit the
                scheme or earlier batches.
        """
        index = self._batches if batch is None else int(batch)
        location = f"site {site or '(unnamed)'}, batch {index}"
        array = self._as_channels(x, location)
        lo, hi = _extremes(array)
        # Minimum and maximum propagate NaN and infinity, so that the data need no second pass.
        if not (np.isfinite(lo).all() and np.isfinite(hi).all()):
            raise CalibrationError(
                f"{location}: it holds NaN, infinity or a number beyond float32: repair the data or the "
                "model."
            )
        if self._state is not None and lo.size != (channels := self._channels(self._state)):
            raise CalibrationError(
                f"{location}: it has {lo.size} channels on axis {self._scheme.axis}, but earlier batches had "
                f"{channels}: correct the axis or the data."
            )
        measured = self._measure(array, lo, hi, index)
        self._state = measured if self._state is None else self._combine(self._state, measured)
        self._batches += 1
        self.largest = max(-float(lo.min()), float(hi.max()))

    def merge(self, other: Observer) -> Observer:
        """Returns a new observer with the statistics of both, which stay as they are: associative, exact.

        Raises:
            ConfigError: when class, scheme or options differ.
            CalibrationError: when the numbers of channels differ.
        """
        if type(other) is not type(self):
            raise ConfigError(
                f"observers {self.name} and {getattr(other, 'name', other)} cannot merge: use one kind."
            )
        if (other.scheme, other.options) != (self._scheme, self._options):
            raise ConfigError(
                f"two {self.name} observers cannot merge: one is {self._scheme.describe()} {self._options}, "
                f"one {other.scheme.describe()} {other.options}: configure all shards alike."
            )
        merged = type(self)(self._scheme, **self._options)
        merged._batches = self._batches + other._batches
        if self._state is None or other._state is None:
            merged._state = self._state if other._state is None else other._state
            return merged
        channels = self._channels(self._state), self._channels(other._state)
        if channels[0] != channels[1]:
            raise CalibrationError(
                f"two {self.name} observers cannot merge: they saw {channels[0]} and {channels[1]} channels: "
                "show them the same site."
            )
        merged._state = self._combine(self._state, other._state)
        return merged

    def range(self) -> tuple[np.ndarray, np.ndarray]:
        """Chooses the range to quantize, lo and hi: float64, shape ``()`` per tensor or ``(C,)`` per channel.

        Raises:
            CalibrationError: when nothing was observed.
        """
        if self._state is None:
            raise CalibrationError(f"observer {self.name} has seen no data: calibrate on at least one batch.")
        shape = (-1,) if self._scheme.per_channel else ()
        lo, hi = self._choose_range(self._state)
        return lo.astype(np.float64).reshape(shape), hi.astype(np.float64).reshape(shape)

    def qparams(self) -> QParams:
        """Returns the parameters of `range`; `CalibrationError` when nothing was observed."""
        return choose(*self.range(), self._scheme)

    def state_dict(self) -> dict[str, np.ndarray | int | float | str]:
        """Returns the number of batches and the arrays of the state, if there is one, for ``np.savez``."""
        return {"batches": self._batches, **{key: array.copy() for key, array in (self._state or {}).items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces the statistics by a `state_dict` of an observer with the same scheme and options.

        Raises:
            ConfigError: when a key, a type or a shape is not of this observer's state.
        """
        layout = self._layout()
        if set(state) not in ({"batches"}, {"batches", *layout}):
            raise ConfigError(
                f"observer {self.name}: the state holds {', '.join(sorted(map(str, state)))}, not "
                f"{', '.join(['batches', *layout])}: it was saved by another observer."
            )
        arrays = {key: np.array(state[key]) for key in layout if key in state}
        sizes: dict[str | int, int] = {} if self._scheme.per_channel else {"C": 1}
        for key, array in arrays.items():
            dtype, shape = layout[key]
            named = zip(shape, array.shape, strict=False)
            expected = tuple(
                size if isinstance(size, int) else sizes.setdefault(size, n) for size, n in named
            )
            if array.dtype != dtype or array.ndim != len(shape) or array.shape != expected:
                raise ConfigError(
                    f"observer {self.name}: {key} is {array.dtype} of shape {array.shape}, not "
                    f"{dtype.__name__} of shape ({', '.join(map(str, shape))}): keep the options that it was "
                    "saved with."
                )
        batches = int(state["batches"])
        if (batches > 0) != bool(arrays):
            raise ConfigError(
                f"observer {self.name}: the state counts {batches} batches, but its data do not fit."
            )
        self._batches, self._state = batches, arrays or None

    def _channels(self, state: State) -> int:
        """Returns the number of channels in ``state``."""
        key, axis = next(
            (key, shape.index("C")) for key, (_, shape) in self._layout().items() if "C" in shape
        )
        return state[key].shape[axis]

    def _as_channels(self, x: np.ndarray, location: str) -> np.ndarray:
        """Reshapes x to contiguous float32 of shape (A, C, B), C being 1 per tensor."""
        x = np.asarray(x)
        if x.dtype.kind != "f" or not x.size:
            problem = f"holds {x.dtype} values" if x.size else f"is an empty array of shape {x.shape}"
            raise CalibrationError(
                f"{location}: it {problem}: give an array of floats with at least one element."
            )
        with np.errstate(over="ignore"):  # to infinity, which `observe` refuses
            x = np.ascontiguousarray(x, dtype=np.float32)
        axis = self._scheme.axis
        if axis is None:
            return x.reshape(1, 1, -1)
        if not -x.ndim <= axis < x.ndim:
            raise CalibrationError(
                f"{location}: shape {x.shape} lacks channel axis {axis}: choose another axis."
            )
        axis %= x.ndim
        return x.reshape(int(np.prod(x.shape[:axis])), x.shape[axis], -1)


def _extremes(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns minimum and maximum of each channel of (A, C, B), shape (C,); NaN if it holds one."""
    with np.errstate(invalid="ignore"):
        if x.shape[1] == 1:
            lo, hi = x.min().reshape(1), x.max().reshape(1)
        elif x.shape[0] == 1:
            lo, hi = x[0].min(axis=1), x[0].max(axis=1)
        else:  # numpy is up to six times slower over both axes at once
            lo, hi = x.min(axis=0).min(axis=1), x.max(axis=0).max(axis=1)
    # + 0.0 makes 0.0 of -0.0: otherwise the sign would depend on the order of the data.
    return lo + np.float32(0.0), hi + np.float32(0.0)


def to_dict(observer: Observer) -> dict[str, Any]:
    """Converts an observer to name, options, scheme and state for JSON; arrays are compressed base64."""
    return {
        "observer": observer.name,
        "options": observer.options,
        "scheme": observer.scheme.to_dict(),
        "state": {key: _pack(value) for key, value in observer.state_dict().items()},
    }


def from_dict(data: Mapping[str, Any]) -> Observer:
    """Rebuilds the observer from which `to_dict` made ``data``.

    A name ``pkg.mod:Class`` in ``data`` imports that module: load only data that you trust.

    Raises:
        ConfigError: when the dict is not one of `to_dict`, or its observer is unknown.
        SchemeError: when its scheme is impossible.
    """
    keys = ("observer", "options", "scheme", "state")
    whole = isinstance(data, Mapping) and set(data) == set(keys)
    if not whole or not all(isinstance(data[key], Mapping) for key in keys[1:]):
        raise ConfigError(
            f"a saved observer has {keys[0]}, and mappings {', '.join(keys[1:])}: this is none."
        )
    cls = resolve(_PACKAGE, data["observer"], Observer)
    observer: Observer = cls(QScheme.from_dict(data["scheme"]), **data["options"])
    observer.load_state_dict({key: _unpack(key, value) for key, value in data["state"].items()})
    return observer


def _pack(value: Any) -> Any:
    """Converts an array to a dict of strings and numbers; returns other values unchanged."""
    if not isinstance(value, np.ndarray):
        return value
    little = np.ascontiguousarray(value, value.dtype.newbyteorder("<"))
    packed = base64.b64encode(zlib.compress(little.tobytes(), 1)).decode("ascii")
    return {"dtype": value.dtype.name, "shape": list(value.shape), "zlib": packed}


def _unpack(key: str, value: Any) -> Any:
    """Reverses `_pack`; ``key`` names the value in errors."""
    if not isinstance(value, Mapping):
        return value
    try:
        dtype = np.dtype(value["dtype"]).newbyteorder("<")
        flat = np.frombuffer(zlib.decompress(base64.b64decode(value["zlib"], validate=True)), dtype)
        return flat.reshape(value["shape"]).astype(dtype.newbyteorder("="))
    except (KeyError, TypeError, ValueError, zlib.error) as error:
        raise ConfigError(f"a saved observer is damaged at {key!r} ({error}): calibrate again.") from None


# Exponential moving averages of what each batch says about the ends of the range, mergeable in any order.


class MovingObserver(Observer):
    """Abstract: averages the ends of batches, later ones weighing more.

    ``v <- momentum * v + (1 - momentum) * new``. The average begins with the first batch, as in MegEngine's
    ``ExponentialMovingAverageObserver``. Of n batches the first weighs ``momentum**(n - 1)``, one with
    ``age`` batches after it ``(1 - momentum) * momentum**age``.

    Averages do not merge, but lists of batches do: the state keeps the ends of each batch, ordered by batch
    index, and `range` averages them. Shards must pass the index in the whole run as ``batch``; batches of
    one index keep the order in which they were observed or merged.

    A subclass defines the ends of a batch in `_ends`.

    Options:
        momentum: 0 (only the last batch) to 1 (only the first).
    """

    class Options(OptionModel):
        momentum: Annotated[Float, Field(ge=0, le=1)] = 0.9

    @abstractmethod
    def _ends(self, x: np.ndarray, lo: np.ndarray, hi: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Measures the ends of one batch, float32 (C,), from the arguments of `_measure`."""

    def _layout(self) -> Layout:
        return {
            "batch": (np.int64, ("R",)),
            "lo": (np.float32, ("R", "C")),
            "hi": (np.float32, ("R", "C")),
        }

    def _measure(self, x: np.ndarray, lo: np.ndarray, hi: np.ndarray, batch: int) -> State:
        low, high = self._ends(x, lo, hi)
        return {"batch": np.array([batch], np.int64), "lo": low[None], "hi": high[None]}

    def _combine(self, first: State, second: State) -> State:
        rows = {key: np.concatenate([first[key], second[key]]) for key in first}
        order = np.argsort(rows["batch"], kind="stable")
        return {key: array[order] for key, array in rows.items()}

    def _choose_range(self, state: State) -> tuple[np.ndarray, np.ndarray]:
        lo, hi = state["lo"].astype(np.float64), state["hi"].astype(np.float64)
        return self._average(lo), self._average(hi)

    def _average(self, rows: np.ndarray) -> np.ndarray:
        """Computes the moving average over the rows of shape (R, C): shape (C,)."""
        momentum = self._options["momentum"]
        average = rows[0]
        for row in rows[1:]:
            average = momentum * average + (1.0 - momentum) * row
        return average

"""Maps ``x * gain + shift`` of a tensor, as arrays that broadcast to its shape."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["LinearMap", "identity_map"]


@dataclass(frozen=True)
class LinearMap:
    """The map ``x * gain + shift`` of the elements of a tensor.

    Attributes:
        gain: float64 array of the tensor's rank; each axis has size 1 or the size of the tensor's axis. NaN
            stands for elements that nothing reads, whose gain is free.
        shift: array of the same rank; NaN where ``gain`` is NaN.
    """

    gain: np.ndarray
    shift: np.ndarray

    @property
    def is_uniform(self) -> bool:
        """Whether all elements have one gain and one shift."""
        return self.gain.size == 1 and self.shift.size == 1

    @property
    def shifts(self) -> bool:
        """Whether some element has a shift other than 0."""
        return bool(np.any(np.nan_to_num(self.shift) != 0))

    @property
    def is_positive(self) -> bool:
        """Whether all gains are larger than 0."""
        return bool(np.all(np.isnan(self.gain) | (self.gain > 0)))

    def is_constant_along(self, axes: tuple[int, ...]) -> bool:
        """Returns whether gain and shift do not depend on the position along ``axes``."""
        return all(array.shape[axis] == 1 for array in (self.gain, self.shift) for axis in axes)

    def with_rank(self, rank: int) -> LinearMap:
        """Returns a uniform map for a tensor of another rank."""
        form = (1,) * rank
        return LinearMap(self.gain.reshape(form), self.shift.reshape(form))

    def after(self, inner: LinearMap) -> LinearMap:
        """Returns the map that applies ``inner`` first and this map to its result."""
        return LinearMap(inner.gain * self.gain, inner.shift * self.gain + self.shift).compressed()

    def full(self, shape: tuple[int, ...]) -> LinearMap:
        """Returns the map with one gain and one shift for each element of a tensor of ``shape``."""
        return LinearMap(np.broadcast_to(self.gain, shape), np.broadcast_to(self.shift, shape))

    def compressed(self, free: bool = False) -> LinearMap:
        """Returns the map with size 1 along each axis along which it is constant.

        Args:
            free: whether elements that nothing reads may get the numbers of others.
        """
        arrays = np.broadcast_arrays(self.gain, self.shift)
        for axis in range(arrays[0].ndim):
            if arrays[0].shape[axis] > 1 and all(_is_constant(array, axis, free) for array in arrays):
                arrays = [np.fmax.reduce(array, axis=axis, keepdims=True) for array in arrays]
        return LinearMap(*arrays)

    def with_identity(self) -> LinearMap:
        """Returns the map with gain 1 and shift 0 for elements that nothing reads."""
        return LinearMap(*(np.where(np.isnan(a), n, a) for a, n in ((self.gain, 1.0), (self.shift, 0.0))))

    def per_channel(self, axis: int, channels: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Returns gain and shift of each channel, (C,); None if they depend on another axis, too."""
        whole = self.compressed(free=True)
        others = tuple(i for i in range(whole.gain.ndim) if i != axis % whole.gain.ndim)
        if not whole.is_constant_along(others):
            return None
        known = whole.with_identity()
        gain, shift = (np.broadcast_to(a.reshape(-1), (channels,)) for a in (known.gain, known.shift))
        return gain, shift


def identity_map(rank: int) -> LinearMap:
    """Returns the map that changes nothing, for a tensor of ``rank`` axes."""
    return LinearMap(np.ones((1,) * rank), np.zeros((1,) * rank))


def _is_constant(array: np.ndarray, axis: int, free: bool) -> bool:
    """Returns whether ``array`` is constant along ``axis``; ``free`` leaves NaN out of the comparison."""
    largest = np.fmax.reduce(array, axis=axis, keepdims=True)
    unknown = np.isnan(array)
    if not free:
        unknown = unknown.all(axis=axis, keepdims=True)
    return bool(np.all(unknown | (array == largest)))

"""The arithmetic of equalization on the parameters of a float graph, in float64, written at the end."""

from __future__ import annotations

import numpy as np

from qtrace.fakequant.base import split_blocks
from qtrace.graph.types import TracedModule
from qtrace.graph.walk import get_module
from qtrace.metrics import finite_or_none, sqnr_db
from qtrace.numerics import alive, choose, fake_quantize
from qtrace.ops import OpCall
from qtrace.preparation.annotation import Site
from qtrace.ptq.layers.channels import ChannelGroup, input_axes
from qtrace.ptq.layers.quantized import write
from qtrace.scheme import QScheme

__all__ = ["Parameters", "factors", "precision", "rounded_weight", "site_sqnr", "weight_sqnr"]


class Parameters:
    """Weights and biases of a graph as float64 arrays.

    Args:
        model: the graph; it is changed by `store` only.
    """

    def __init__(self, model: TracedModule) -> None:
        self.model = model
        self._values: dict[str, np.ndarray] = {}

    def __getitem__(self, path: str) -> np.ndarray:
        if path not in self._values:
            self._values[path] = get_module(self.model, path).numpy().astype(np.float64)
        return self._values[path]

    def weight(self, call: OpCall) -> np.ndarray:
        """Returns the weight of a layer in the shape that the model has."""
        assert call.weight is not None
        return self[call.weight.expr.name]

    def ranges(self, call: OpCall, outputs: bool) -> np.ndarray:
        """Returns the largest magnitude of the weights of each output or input channel, shape (C,)."""
        weight = np.abs(self.weight(call))
        axes = call.channel_axes if outputs else input_axes(call)
        rest = tuple(a for a in range(weight.ndim) if a not in axes)
        ranges: np.ndarray = weight.max(axis=rest).reshape(-1)
        return ranges

    def scale(self, group: ChannelGroup, factor: np.ndarray) -> None:
        """Divides the channels of a group by ``factor`` (C,); the outputs of the model stay the same."""
        for call in group.writers:
            self._multiply(call, 1.0 / factor, call.channel_axes)
            if call.bias is not None:
                self.divide(call.bias.expr.name, factor)
        for call in group.readers:
            self._multiply(call, factor, input_axes(call))

    def multiplied(self, call: OpCall, factor: np.ndarray) -> np.ndarray:
        """Returns the weight of a layer whose input channels are multiplied by ``factor`` (C,)."""
        return self._product(call, factor, input_axes(call))

    def divide(self, path: str, divisor: np.ndarray) -> None:
        """Divides the parameter at ``path`` by ``divisor`` (C,)."""
        self._values[path] = (self[path].reshape(-1) / divisor).reshape(self[path].shape)

    def _multiply(self, call: OpCall, factor: np.ndarray, axes: tuple[int, ...]) -> None:
        assert call.weight is not None
        self._values[call.weight.expr.name] = self._product(call, factor, axes)

    def _product(self, call: OpCall, factor: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
        weight = self.weight(call)
        shape = tuple(n if i in axes else 1 for i, n in enumerate(weight.shape))
        return weight * factor.reshape(shape)

    def add_to_bias(self, call: OpCall, shift: np.ndarray) -> None:
        """Adds ``shift`` (C,) to the bias of a layer that has one."""
        assert call.bias is not None
        path = call.bias.expr.name
        self._values[path] = self[path] + shift.reshape(self[path].shape)

    def store(self) -> None:
        """Writes the values into the graph, as float32."""
        for path, value in self._values.items():
            write(self.model, path, value)


def factors(parameters: Parameters, group: ChannelGroup) -> np.ndarray:
    """Returns the divisors of a group's channels that make writers and readers use their ranges alike.

    For one writer and one reader with ranges r1 and r2 this is ``sqrt(r1 / r2)``, after which both ranges are
    ``sqrt(r1 * r2)`` (Nagel et al. 2019, section 4.1 and appendix A). Of several layers on one side, each
    channel counts as in the layer where it is largest, measured by that layer's own range; the means of
    these ranges give the common factor. Channels that one side does not use, or whose weights are next to 0
    compared with the others (`qtrace.numerics.alive`), keep their scale: their output may be only a bias.
    """
    sides = []
    for calls, outputs in ((group.writers, True), (group.readers, False)):
        ranges = [parameters.ranges(call, outputs) for call in calls]
        whole = [max(float(r.max()), float(np.finfo(np.float64).tiny)) for r in ranges]
        share = np.max(np.stack([r / w for r, w in zip(ranges, whole, strict=True)]), axis=0)
        sides.append(share * np.exp(np.mean(np.log(whole))))
    written, read = sides
    used = alive(written) & alive(read)
    return np.where(used, np.sqrt(np.where(used, written, 1.0) / np.where(used, read, 1.0)), 1.0)


def precision(ranges: np.ndarray) -> np.ndarray:
    """Returns the bits that each used channel loses under one scale for all: ``log2(max(r) / r)``."""
    used = ranges[alive(ranges)]
    return np.log2(used.max() / used) if used.size else np.zeros(1)


def weight_sqnr(weight: np.ndarray, scheme: QScheme, axes: tuple[int, ...]) -> float | None:
    """Returns the SQNR in dB of a weight that is rounded over its whole range; None if it is exact.

    Args:
        weight: the weight in the shape that the model has.
        scheme: the scheme of the weight.
        axes: the axes that count channels with a scale each; () for one scale.
    """
    return finite_or_none(sqnr_db(weight, rounded_weight(weight, scheme, axes)))


def rounded_weight(weight: np.ndarray, scheme: QScheme, axes: tuple[int, ...]) -> np.ndarray:
    """Rounds a weight over its whole range.

    Args:
        weight: the weight.
        scheme: the scheme of the weight.
        axes: the axes that count channels with a scale each; () for one scale.
    """
    if scheme.block is not None:
        blocks = split_blocks(weight, scheme.block)
        return fake_quantize(weight, choose(blocks.min(axis=1), blocks.max(axis=1), scheme))
    moved = np.moveaxis(weight, axes, range(len(axes))) if axes else weight
    rows = moved.reshape(int(np.prod(moved.shape[: len(axes)])), -1)
    if axes:
        qparams = choose(rows.min(axis=1), rows.max(axis=1), scheme.replace(axis=0))
    else:
        qparams = choose(rows.min(), rows.max(), scheme)
    rounded = fake_quantize(rows, qparams).reshape(moved.shape)
    return np.moveaxis(rounded, range(len(axes)), axes) if axes else rounded


def site_sqnr(parameters: Parameters, call: OpCall, site: Site) -> float | None:
    """Returns the `weight_sqnr` of a layer under the plan of its weight's site."""
    assert site.plan is not None
    return weight_sqnr(parameters.weight(call), site.plan.scheme, site.channel_axes)

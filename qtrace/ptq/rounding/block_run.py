"""The data of a learned block from both graphs, and its computation with trial weights and scales."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from megengine import Parameter, Tensor

from qtrace.fakequant.base import FakeQuant
from qtrace.fakequant.kernels.kernel import Learn, Levels, quant_dequant
from qtrace.graph.interpreter import interpret
from qtrace.graph.types import Node
from qtrace.graph.walk import exprs, get_module, owner
from qtrace.numerics import SMALLEST_SCALE
from qtrace.ptq.base import CalibratedTask, Noise
from qtrace.ptq.layers.quantized import LayerTwins, QuantizedLayer
from qtrace.ptq.rounding.blocks import Block
from qtrace.ptq.rounding.soft_rounding import SoftRounding
from qtrace.scheme import QParams

__all__ = ["BlockData", "BlockRun"]

# From a tensor that is about to be rounded to its mask: 1 where it is rounded, 0 where it stays float.
Masks = Callable[[Tensor], Tensor]


class BlockData:
    """The inputs and float outputs of a block: of all images, or by batch where their shapes differ."""

    def __init__(self, twins: LayerTwins, block: Block) -> None:
        twins.advance(block.exprs[0])
        self.entries = len(block.entries)
        self.parts = [self._part(twins, block, batch) for batch in range(twins.count)]
        self.values = sum(v.size for part in self.parts for v in part[2 * self.entries :])
        self.whole = self._joined()
        if self.whole is not None:
            ends = np.cumsum([len(part[0]) for part in self.parts])[:-1]
            self.parts = [list(p) for p in zip(*(np.split(a, ends) for a in self.whole), strict=True)]

    @staticmethod
    def _part(twins: LayerTwins, block: Block, batch: int) -> list[np.ndarray]:
        """Returns a batch: its entries in the quantized and in the float graph, and its float exits."""
        rounded = [twins.read(n, batch) for n in block.entries]
        exact = [twins.float.value(twins.node(n), batch).numpy() for n in block.entries]
        twin = [twins.twin(e) for e in block.exprs]
        exits = twins.float.compute(twin, [twins.node(n) for n in block.exits], batch)
        return [*rounded, *exact, *(v.numpy() for v in exits)]

    def _joined(self) -> list[np.ndarray] | None:
        """Joins all parts along the axis of images; None if their shapes do not allow it."""
        first = self.parts[0]
        images = first[0].shape[0] if first[0].ndim else 0
        for part in self.parts:
            same = all(a.shape[1:] == b.shape[1:] for a, b in zip(part, first, strict=True))
            if not same or any(a.ndim == 0 or a.shape[0] != part[0].shape[0] for a in part):
                return None
        return [np.concatenate(arrays) for arrays in zip(*self.parts, strict=True)] if images else None

    def draw(self, rng: np.random.Generator, size: int) -> list[np.ndarray]:
        """Draws ``size`` images, or a whole batch where the images are not joined."""
        if self.whole is None:
            return self.parts[int(rng.integers(len(self.parts)))]
        chosen = rng.integers(len(self.whole[0]), size=min(size, len(self.whole[0])))
        return [a[chosen] for a in self.whole]


class _LayerState:
    """A layer while it is learned.

    Attributes:
        nearest: the float weight, rounded to nearest.
        start: the weight as the model has it: float, or with roundings that were learned before.
    """

    def __init__(self, task: CalibratedTask, layer: QuantizedLayer, weight: np.ndarray) -> None:
        self.layer = layer
        self.start = get_module(task.model, layer.weight).numpy()
        quant = layer.quant
        scheme = quant.scheme
        self.nearest = quant.quantize_dequantize(Tensor(weight)).numpy()
        self.rounding = SoftRounding(
            weight,
            *quant.grid_of(weight.shape),
            (scheme.qmin, scheme.qmax),
        )
        if not np.array_equal(self.start, weight):
            self.rounding.lean_to(self.start)
        self.start = quant.quantize_dequantize(Tensor(self.start)).numpy()
        self.parameter = Parameter(self.start)
        assert layer.call.weight is not None
        self.key = layer.call.weight


class BlockRun:
    """Computes a block with weights and scales of its own.

    Args:
        task: the model and the data.
        twins: both graphs.
        block: the block to compute.
        floats: float values of each weight by its path.
    """

    def __init__(
        self, task: CalibratedTask, twins: LayerTwins, block: Block, floats: Mapping[str, np.ndarray]
    ) -> None:
        self.twins, self.block = twins, block
        self.layers = [_LayerState(task, layer, floats[layer.weight]) for layer in block.layers]
        self.scales = {id(m): (m, Parameter(m.effective_scale().numpy())) for m in _own_scales(task, block)}

    def forward(self, entries: Sequence[Tensor], masks: Masks | None = None) -> list[Tensor]:
        """Computes the block's exits from its ``entries``; without ``masks``, everything is rounded."""
        weights = {state.key: state.parameter for state in self.layers}
        values: dict[Node, Any] = dict(zip(self.block.entries, entries, strict=True))
        for expr in self.block.exprs:
            module = owner(expr)
            inputs = [self._value(n, values, weights) for n in expr.inputs]
            if isinstance(module, FakeQuant):
                results = [self._round(module, inputs[1], masks)]
            else:
                outputs = interpret(expr, inputs)
                results = [] if outputs is None else list(outputs)
            values.update((n, v) for n, v in zip(expr.outputs, results, strict=True))
        return [values[n] for n in self.block.exits]

    def _value(self, node: Any, values: dict[Node, Any], weights: dict[Node, Parameter]) -> Any:
        if node in weights:
            return weights[node]
        return values[node] if node in values else self.twins.quantized.value(node, 0)

    def _round(self, module: FakeQuant, x: Tensor, masks: Masks | None) -> Tensor:
        learned = self.scales.get(id(module))
        scale = module.signed_scale() if learned is None else learned[1]
        zero, levels = module.effective_zero_point(), Levels.of(module.scheme)
        learn = None if learned is None else Learn()
        y = quant_dequant(module.shaped(x), scale, zero, levels, module.shape, learn)
        return y if masks is None else x + (y - x) * masks(x)

    def noise(self, data: BlockData, weights: list[np.ndarray]) -> Noise:
        """Measures the error of the block's outputs with ``weights`` on all data."""
        for state, weight in zip(self.layers, weights, strict=True):
            state.parameter._reset(Parameter(weight))
        noise = Noise(self.block.name)
        for part in data.parts:
            exits = self.forward([Tensor(v) for v in part[: data.entries]])
            for reference, output in zip(part[2 * data.entries :], exits, strict=True):
                noise.add(reference, output.numpy())
        return noise

    def state(self) -> list[np.ndarray]:
        """Returns all weights, roundings and scales that the learned result depends on."""
        rounded = [a for s in self.layers for a in (s.rounding.v, s.rounding.low, s.start)]
        quants = [state.layer.quant for state in self.layers]
        quants += [m for e in self.block.exprs if isinstance(m := owner(e), FakeQuant)]
        return [*rounded, *(t.numpy() for q in quants for t in (q.scale, q.zero_point))]

    def set_scales(self, values: list[np.ndarray]) -> None:
        """Sets the learned scales to ``values``."""
        for (_, scale), value in zip(self.scales.values(), values, strict=True):
            scale._reset(Parameter(value))

    def store_scales(self) -> None:
        """Stores the learned scales in their fake quants."""
        for module, scale in self.scales.values():
            value = np.maximum(np.abs(scale.numpy()), SMALLEST_SCALE).reshape((-1,) if module.shape else ())
            zero = module.effective_zero_point().numpy().reshape(value.shape).astype(np.int32)
            module.set_qparams(QParams(module.scheme, value.astype(np.float32), zero))


def _own_scales(task: CalibratedTask, block: Block) -> list[FakeQuant]:
    """Returns the fake quants of activations that are called in the block and nowhere else."""
    calls: dict[int, int] = {}
    for expr in exprs(task.model):
        module = owner(expr)
        if isinstance(module, FakeQuant):
            calls[id(module)] = calls.get(id(module), 0) + 1
    inside: dict[int, list[FakeQuant]] = {}
    for expr in block.exprs:
        module = owner(expr)
        if isinstance(module, FakeQuant):
            inside.setdefault(id(module), []).append(module)
    return [
        m[0]
        for key, m in inside.items()
        if len(m) == calls[key] and not m[0].scheme.power_of_two and not m[0].static
    ]

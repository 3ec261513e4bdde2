"""Runs a block with soft rounding, forwards and backwards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from megengine import Parameter, Tensor

from qtrace.fakequant.base import FakeQuant
from qtrace.fakequant.kernels import Learn, Levels, quant_dequant
from qtrace.graph.interpreter import interpret
from qtrace.graph.opaque import OpaqueOp
from qtrace.graph.types import Expr, ModuleNode, Node, TensorNode, TracedModule
from qtrace.graph.walk import exprs, get_module, is_float_tensor, owner, users
from qtrace.learning import MIN_TRACED_STEPS, LearningEngine, LearningStep, MegEngineEngine
from qtrace.numerics import SMALLEST_SCALE
from qtrace.preparation.phases import has_wrong_gradient
from qtrace.ptq.base import CalibratedTask, Noise
from qtrace.ptq.layers.quantized import LayerTwins, QuantizedLayer
from qtrace.scheme import QParams

# The steps of learned rounding: what is drawn for a step, and the loss of a block with its gradients.


@dataclass(frozen=True)
class DescentSettings:
    """The settings of `learn_block`.

    Attributes:
        iterations: steps of Adam.
        batch: images in a step.
        lr: learning rate of the roundings; None for 20 / iterations (the paper has 20,000 steps of 1e-3), but
            0.1 at most.
        scale_lr: learning rate of activation scales, as a share of the scale; 0 to keep the scales.
        drop: the share of values that are not rounded in a step.
        warmup: the share of the steps without the regularizer.
        beta: the exponent of the regularizer at its start and at the end.
        strength: the factor of the regularizer's mean over all weights, next to an error that is 1 for
            rounding to nearest.
        seed: the seed of the drawn images and masks, together with the name of the block.
    """

    iterations: int
    batch: int
    lr: float | None
    scale_lr: float
    drop: float
    warmup: float
    beta: tuple[float, float]
    strength: float
    seed: int

    @property
    def rate(self) -> float:
        """The learning rate of the roundings."""
        return min(0.1, 20.0 / self.iterations) if self.lr is None else self.lr


class BlockGradients:
    """Computes loss and gradients of a step of a block.

    Args:
        run: the block with its parameters.
        data: the inputs of the block and the references of its outputs.
        settings: the settings of the descent.
        unit: the mean squared error that counts as 1.
        engine: computes the gradients.
        forward: computes the exits from the entries and the function that gives masks, or None.
        tensor: makes a tensor of the engine of an array.
    """

    def __init__(
        self,
        run: BlockRun,
        data: BlockData,
        settings: DescentSettings,
        unit: float,
        engine: LearningEngine,
        forward: Callable[[Sequence[Any], Any], Sequence[Any]],
        tensor: Callable[[np.ndarray], Any],
    ) -> None:
        self.run, self.data, self.settings, self.unit = run, data, settings, unit
        self.engine = engine
        learned = [scale for _, scale in run.scales.values()] if settings.scale_lr else []
        self.parameters: list[Parameter] = [*(state.parameter for state in run.layers), *learned]
        self._forward, self._tensor = forward, tensor
        self.mask_shapes: list[tuple[int, ...]] = []

    def __call__(self, rng: np.random.Generator, drop: float) -> tuple[float, list[np.ndarray]]:
        """Draws images and masks, the latter with the share ``drop`` of values to leave unrounded.

        Returns:
            The loss, and the gradient of every parameter.
        """
        entries, references = self._draw(rng, drop)
        size = self.unit * sum(math.prod(reference.shape) for reference in references)
        masks = [draw_mask(rng, shape, drop) for shape in self.mask_shapes]

        def losses(*inputs: Any) -> list[Any]:
            tensors = [self._tensor(value) for value in inputs]
            later = iter(tensors[len(entries) + len(references) :])
            draw = (
                (lambda x: next(later)) if masks else (lambda x: self._tensor(draw_mask(rng, x.shape, drop)))
            )
            exits = self._forward(tensors[: len(entries)], draw if self.settings.drop else None)
            pairs = zip(exits, tensors[len(entries) :], strict=False)
            errors = [((value - reference) ** 2).sum() for value, reference in pairs]
            return [sum(errors[1:], errors[0]) / size]

        inputs = [*entries, *references, *masks]
        loss, *gradients = self.engine.gradients(LearningStep(losses, self.parameters, inputs))
        assert loss is not None
        pairs = zip(self.parameters, gradients, strict=True)
        return float(loss), [np.zeros(p.shape, np.float32) if g is None else g for p, g in pairs]

    def _draw(self, rng: np.random.Generator, drop: float) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Draws the entries of a step, of which the share ``drop`` is exact, and the references."""
        drawn, n = self.data.draw(rng, self.settings.batch), self.data.entries
        entries, references = drawn[:n], drawn[2 * n :]
        if self.settings.drop:
            entries = [
                np.where(rng.random(r.shape, np.float32) < drop, e, r)
                for r, e in zip(entries, drawn[n : 2 * n], strict=True)
            ]
        return entries, references


def draw_mask(rng: np.random.Generator, shape: Sequence[int], drop: float) -> np.ndarray:
    """Draws a mask: 0 for the share ``drop`` of values, which stay unrounded, else 1."""
    return (rng.random(tuple(int(n) for n in shape), np.float32) >= drop).astype(np.float32)


class MegEngineGradients(BlockGradients):
    """Computes steps in MegEngine, under ``jit.trace`` if all have the same shapes.

    Args:
        run, data, settings, unit: as for `BlockGradients`.
        traced: whether the steps may run under ``jit.trace``.
    """

    def __init__(
        self, run: BlockRun, data: BlockData, settings: DescentSettings, unit: float, traced: bool = True
    ) -> None:
        traced = traced and not any(isinstance(owner(expr), OpaqueOp) for expr in run.block.exprs)
        jit = traced and data.whole is not None and settings.iterations >= MIN_TRACED_STEPS
        super().__init__(run, data, settings, unit, MegEngineEngine(jit), run.forward, _as_tensor)
        if jit and settings.drop:
            drawn = data.draw(np.random.default_rng(0), settings.batch)[: data.entries]
            run.forward([Tensor(value) for value in drawn], self._record_shape)

    def _record_shape(self, x: Tensor) -> Tensor:
        self.mask_shapes.append(tuple(int(n) for n in x.shape))
        return Tensor(1.0)


def _as_tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else Tensor(value)


# Blocks of a prepared graph that are learned together: their roundings, data and computation.

_ZETA, _GAMMA = 1.1, -0.1
_SPAN = _ZETA - _GAMMA


class SoftRounding:
    """The roundings of one weight.

    Args:
        weight: the float weight, any shape.
        scale: positive scales, broadcastable to ``weight``.
        zero_point: integer zero points, broadcastable to ``weight``.
        bounds: the smallest and the largest integer.

    Attributes:
        v: the learned variable, of the shape of ``weight``; initially h(v) is the fraction of ``w / s``.
    """

    def __init__(
        self, weight: np.ndarray, scale: np.ndarray, zero_point: np.ndarray, bounds: tuple[int, int]
    ) -> None:
        self.scale = scale
        self.bounds = bounds[0] - zero_point, bounds[1] - zero_point
        exact = weight / scale
        self.low = np.floor(exact)
        fraction = exact - self.low
        self.v = np.log((fraction - _GAMMA) / (_ZETA - fraction)).astype(weight.dtype)

    def lean_to(self, weight: np.ndarray, certain: float = 0.8) -> None:
        """Starts from the roundings of ``weight`` instead of the fractions.

        Args:
            weight: the rounded weight.
            certain: the value of h for a weight that is rounded up; 1 - h for one that is rounded down. It is
                below 1, since h lacks a gradient at 0 and 1.
        """
        up = np.where(weight / self.scale - self.low > 0.5, certain, 1.0 - certain)
        self.v = np.log((up - _GAMMA) / (_ZETA - up)).astype(self.v.dtype)

    def up(self) -> np.ndarray:
        """Returns h(V), the share of a step by which each weight is rounded up, 0 to 1."""
        return np.clip(_SPAN * _sigmoid(self.v) + _GAMMA, 0.0, 1.0)

    def soft(self) -> np.ndarray:
        """Returns the weight with its relaxed roundings."""
        return self._weight(self.up())

    def hard(self) -> np.ndarray:
        """Returns the weight with h rounded to 0 or 1: integers times the scale."""
        return self._weight((self.up() >= 0.5).astype(self.v.dtype))

    def _weight(self, up: np.ndarray) -> np.ndarray:
        return np.asarray(np.clip(self.low + up, *self.bounds) * self.scale).astype(self.v.dtype)

    def gradient(self, of_weight: np.ndarray, beta: float, strength: float) -> np.ndarray:
        """Computes the gradient of loss plus regularizer with respect to `v`.

        Args:
            of_weight: the gradient of the loss with respect to `soft`.
            beta: the exponent of the regularizer.
            strength: the factor of the regularizer; 0 for none.
        """
        sigmoid = _sigmoid(self.v)
        up = _SPAN * sigmoid + _GAMMA
        inside = (up > 0.0) & (up < 1.0)
        moves = (self.low + up >= self.bounds[0]) & (self.low + up <= self.bounds[1])
        total = of_weight * self.scale * moves
        if strength:
            offset = 2.0 * up - 1.0
            total = total - strength * 2.0 * beta * np.abs(offset) ** (beta - 1.0) * np.sign(offset)
        return np.asarray(total * (inside * _SPAN * sigmoid * (1.0 - sigmoid))).astype(self.v.dtype)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.asarray(1.0 / (1.0 + np.exp(-x)))


def anneal(progress: float, warmup: float, beta: tuple[float, float]) -> float | None:
    """Returns the exponent of the regularizer, which falls along a cosine; None before it starts.

    Args:
        progress: the share of completed iterations, 0 to 1.
        warmup: the share of iterations without the regularizer.
        beta: the exponent of the regularizer at its start and at the end.
    """
    if progress < warmup:
        return None
    fraction = (progress - warmup) / max(1.0 - warmup, 1e-9)
    return beta[1] + 0.5 * (beta[0] - beta[1]) * (1.0 + math.cos(math.pi * fraction))


@dataclass(frozen=True)
class Block:
    """Exprs that are computed together.

    Attributes:
        exprs: the exprs in graph order, without exprs that depend only on parameters.
        layers: the layers of the block whose roundings are learned.
        entries: the tensors that the block reads from outside.
        exits: the outputs of the block, which are compared with the float graph's.
    """

    exprs: tuple[Expr, ...]
    layers: tuple[QuantizedLayer, ...]
    entries: tuple[TensorNode, ...]
    exits: tuple[TensorNode, ...]

    @property
    def name(self) -> str:
        """The names of the exits."""
        return ", ".join(n.name for n in self.exits)


def single_layers(model: TracedModule, layers: Iterable[QuantizedLayer]) -> list[Block]:
    """Builds a block for each layer, with the activation after it if that is the only consumer."""
    blocks = []
    for layer in layers:
        steps, out = [layer.call.expr], layer.call.out
        consumers = list(users(out))
        if len(consumers) == 1 and not any(out is n for n in model.graph.outputs):
            (consumer,) = consumers
            if _is_unary(consumer) and not isinstance(owner(consumer), FakeQuant):
                steps.append(consumer)
                out = consumer.outputs[0]
        blocks.append(Block(tuple(steps), (layer,), (layer.call.inputs[0],), (out,)))
    return blocks


def _is_unary(expr: Expr) -> bool:
    """Whether ``expr`` computes one float tensor from one tensor of the same shape."""
    tensors = [n for n in expr.inputs if isinstance(n, TensorNode)]
    if len(tensors) != 1 or len(expr.outputs) != 1 or not is_float_tensor(expr.outputs[0]):
        return False
    return tuple(expr.outputs[0].shape or ()) == tuple(tensors[0].shape or ())


def structural_blocks(model: TracedModule, layers: Iterable[QuantizedLayer], max_layers: int) -> list[Block]:
    """Splits a graph into blocks at bottleneck tensors, before these are rounded.

    Args:
        model: a prepared graph.
        layers: the layers whose roundings are learned; each block has at least one.
        max_layers: the most layers of a block; a larger block is split into its layers, as is one with a
            recurrent layer that MegEngine has a wrong gradient for.
    """
    by_expr = {layer.call.expr: layer for layer in layers}
    outputs = [n for n in model.graph.outputs if isinstance(n, TensorNode)]
    dynamic = _dynamic_exprs(model)
    alive_after = _alive_after(model, dynamic)
    blocks: list[Block] = []
    steps: list[Expr] = []
    entry: list[TensorNode] = [n for n in model.graph.inputs if isinstance(n, TensorNode)]
    for index, expr in enumerate(dynamic):
        steps.append(expr)
        inside = [by_expr[e] for e in steps if e in by_expr]
        alive = alive_after[index]
        last = index == len(dynamic) - 1
        if not inside or not (last or _is_cut(alive)):
            continue
        exits = outputs if last else alive
        block = Block(tuple(steps), tuple(inside), tuple(entry), tuple(exits))
        joint = len(inside) <= max_layers and exits and not any(map(has_wrong_gradient, steps))
        blocks += [block] if joint else single_layers(model, inside)
        steps, entry = [], list(alive)
    return blocks


def bottlenecks(model: TracedModule) -> list[TensorNode]:
    """Returns the bottleneck tensors of a prepared graph that are rounded next, in graph order."""
    alive_after = _alive_after(model, _dynamic_exprs(model))
    return list(dict.fromkeys(alive[0] for alive in alive_after if _is_cut(alive)))


def _is_cut(alive: list[TensorNode]) -> bool:
    if len(alive) != 1 or not is_float_tensor(alive[0]):
        return False
    consumers = list(users(alive[0]))
    return bool(consumers) and all(isinstance(owner(e), FakeQuant) for e in consumers)


def _dynamic_exprs(model: TracedModule) -> list[Expr]:
    """Returns the exprs that depend on an input of the graph."""
    fixed = {n for n in model.graph.inputs if isinstance(n, ModuleNode)}
    dynamic = []
    for expr in exprs(model):
        if all(n in fixed for n in expr.inputs):
            fixed.update(expr.outputs)
        else:
            dynamic.append(expr)
    return dynamic


def _alive_after(model: TracedModule, dynamic: list[Expr]) -> list[list[TensorNode]]:
    """Returns, for each expr, the inputs and computed tensors that later exprs read."""
    tensors = {*model.graph.inputs, *(n for e in dynamic for n in e.outputs)}
    alive = {n: n for n in model.graph.outputs if isinstance(n, TensorNode)}
    result = []
    for expr in reversed(dynamic):
        result.append(list(alive.values()))
        for node in expr.outputs:
            alive.pop(node, None)
        alive.update((n, n) for n in expr.inputs if isinstance(n, TensorNode) and n in tensors)
    return result[::-1]


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

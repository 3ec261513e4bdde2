"""Learning roundings, and scales of activations, block by block against the float graph's outputs."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import megengine as mge
import megengine.functional as F
import numpy as np
from megengine import Parameter, Tensor
from megengine.autodiff import GradManager

from qtrace.errors import CalibrationError
from qtrace.fakequant._kernel import Learn, quant_dequant
from qtrace.fakequant.base import FakeQuant
from qtrace.graph.interpreter import interpret
from qtrace.graph.walk import exprs, get_module, owner
from qtrace.numerics import SMALLEST_SCALE
from qtrace.ptq._blocks import Block
from qtrace.ptq._checkpoint import key_of
from qtrace.ptq._layers import Layer, Twins, write
from qtrace.ptq._rounding import Adam, SoftRounding, annealed
from qtrace.ptq.base import CalibratedTask, Noise, SiteError
from qtrace.scheme import QParams

__all__ = ["Learned", "Settings", "learn", "queueless"]


@dataclass(frozen=True)
class Settings:
    """How a block is learned.

    Attributes:
        iterations: steps of Adam.
        batch: images in a step.
        lr: learning rate of the roundings.
        scale_lr: learning rate of activation scales, as a share of the scale; 0 for none.
        drop: the share of values that are not rounded in a step.
        warmup: the share of the steps without regulariser.
        beta: its exponent at the start and at the end.
        strength: its factor, against an error that is 1 for rounding to nearest.
        seed: of what is drawn; together with the name of the block.
    """

    iterations: int
    batch: int
    lr: float
    scale_lr: float
    drop: float
    warmup: float
    beta: tuple[float, float]
    strength: float
    seed: int


@dataclass(frozen=True)
class Learned:
    """What came of a block.

    Attributes:
        error: of its output, with rounding to nearest and as it is now.
        turned: layer -> how many weights are rounded the other way, and how many it has.
        scales: how many activation scales were learned.
        kept: whether the result was better than rounding to nearest; if not, nothing was changed.
    """

    error: SiteError
    turned: dict[str, tuple[int, int]]
    scales: int
    kept: bool


@contextmanager
def queueless() -> Iterator[None]:
    """Within the block MegEngine runs each op at once: from a queue, CPU gradients are wrong now and then."""
    before = mge.config.async_level
    mge.config.async_level = 0
    try:
        yield
    finally:
        mge.config.async_level = before


def learn(task: CalibratedTask, twins: Twins, block: Block, settings: Settings) -> Learned:
    """Learns the roundings of a block and writes them into the model.

    Args:
        task: the model, the float reference and the data.
        twins: both graphs, not yet past the block.
        block: what is learned.
        settings: how.

    Raises:
        CalibrationError: when the loss is not a number, naming the block.
    """
    data = _Data(twins, block)
    run = _Run(task, twins, block)
    nearest = [r.nearest for r in run.layers]
    before = run.noise(data, nearest)
    decided = _decide(task, run, data, settings, before)
    after = run.noise(data, decided)
    kept = after.noise < before.noise
    turned = {}
    if kept:
        for layer, old, new in zip(run.layers, nearest, decided, strict=True):
            step = np.broadcast_to(layer.rounding.scale, new.shape)
            turned[layer.layer.name] = int(np.sum(np.abs(new - old) > 0.5 * step)), new.size
            write(task.model, layer.layer.weight, new)
        run.store_scales()
    twins.quantized.changed()
    error = SiteError(block.name, before.decibels, after.decibels if kept else before.decibels)
    return Learned(error, turned, len(run.scales) if kept and settings.scale_lr else 0, kept)


def _decide(
    task: CalibratedTask, run: _Run, data: _Data, settings: Settings, before: Noise
) -> list[np.ndarray]:
    """The weights with their roundings decided; the scales of ``run`` are then as learned, too."""
    if before.noise == 0:
        return [state.nearest for state in run.layers]
    kept, key = task.checkpoint, ""
    if kept is not None:
        known = [*run.state(), *(a for part in data.parts for a in part)]
        key = key_of(f"{settings} {run.block.name}", known)
        found = kept.load(key)
        if found is not None:
            run.set_scales([found[f"scale{i}"] for i in range(len(run.scales))])
            return [found[f"weight{i}"] for i in range(len(run.layers))]
    _descend(run, data, settings, before.noise / data.values)
    decided = [state.rounding.hard() for state in run.layers]
    if kept is not None:
        arrays = {f"weight{i}": w for i, w in enumerate(decided)}
        arrays.update((f"scale{i}", s.numpy()) for i, (_, s) in enumerate(run.scales.values()))
        kept.save(key, arrays)
    return decided


class _Data:
    """What a block reads and should give, for all images or, where their shapes differ, by batch."""

    def __init__(self, twins: Twins, block: Block) -> None:
        twins.advance(block.exprs[0])
        self.entries = len(block.entries)
        self.parts = [self._part(twins, block, batch) for batch in range(twins.count)]
        self.values = sum(v.size for part in self.parts for v in part[2 * self.entries :])
        self.whole = self._joined()
        if self.whole is not None:
            ends = np.cumsum([len(part[0]) for part in self.parts])[:-1]
            self.parts = [list(p) for p in zip(*(np.split(a, ends) for a in self.whole), strict=True)]

    @staticmethod
    def _part(twins: Twins, block: Block, batch: int) -> list[np.ndarray]:
        """A batch: the entries in the quantized graph and in the float one, and the exits in that."""
        rounded = [twins.read(n, batch) for n in block.entries]
        exact = [twins.float.value(twins.node(n), batch).numpy() for n in block.entries]
        twin = [twins.twin(e) for e in block.exprs]
        want = twins.float.compute(twin, [twins.node(n) for n in block.exits], batch)
        return [*rounded, *exact, *(v.numpy() for v in want)]

    def _joined(self) -> list[np.ndarray] | None:
        """Everything along the axis of images, if the arrays are that alike."""
        one = self.parts[0]
        images = one[0].shape[0] if one[0].ndim else 0
        for part in self.parts:
            same = all(a.shape[1:] == b.shape[1:] for a, b in zip(part, one, strict=True))
            if not same or any(a.ndim == 0 or a.shape[0] != part[0].shape[0] for a in part):
                return None
        return [np.concatenate(arrays) for arrays in zip(*self.parts, strict=True)] if images else None

    def draw(self, rng: np.random.Generator, size: int) -> list[np.ndarray]:
        """Some images, or one of the batches."""
        if self.whole is None:
            return self.parts[int(rng.integers(len(self.parts)))]
        chosen = rng.integers(len(self.whole[0]), size=min(size, len(self.whole[0])))
        return [a[chosen] for a in self.whole]


class _LayerState:
    """A layer while it is learned."""

    def __init__(self, task: CalibratedTask, layer: Layer) -> None:
        self.layer = layer
        weight = get_module(task.model, layer.weight).numpy()
        quant = layer.quant
        scheme = quant.scheme
        self.nearest = quant.quantize_dequantize(Tensor(weight)).numpy()
        self.rounding = SoftRounding(
            weight,
            quant.effective_scale().numpy(),
            quant.effective_zero_point().numpy(),
            (scheme.qmin, scheme.qmax),
        )
        self.parameter = Parameter(self.nearest)
        assert layer.call.weight is not None
        self.key = id(layer.call.weight)


class _Run:
    """Computes a block with weights and scales of its own."""

    def __init__(self, task: CalibratedTask, twins: Twins, block: Block) -> None:
        self.twins, self.block = twins, block
        self.layers = [_LayerState(task, layer) for layer in block.layers]
        self.scales = {id(m): (m, Parameter(m.effective_scale().numpy())) for m in _own_scales(task, block)}

    def forward(
        self, entries: list[np.ndarray], drop: float, rng: np.random.Generator | None
    ) -> list[Tensor]:
        """The exits of the block for the values of its entries."""
        weights = {state.key: state.parameter for state in self.layers}
        values: dict[int, Any] = {id(n): Tensor(v) for n, v in zip(self.block.entries, entries, strict=True)}
        for expr in self.block.exprs:
            module = owner(expr)
            inputs = [self._value(n, values, weights) for n in expr.inputs]
            if isinstance(module, FakeQuant):
                results = [self._round(module, inputs[1], drop, rng)]
            else:
                found = interpret(expr, inputs)
                results = [] if found is None else list(found)
            values.update((id(n), v) for n, v in zip(expr.outputs, results, strict=True))
        return [values[id(n)] for n in self.block.exits]

    def _value(self, node: Any, values: dict[int, Any], weights: dict[int, Parameter]) -> Any:
        if id(node) in weights:
            return weights[id(node)]
        return values[id(node)] if id(node) in values else self.twins.quantized.value(node, 0)

    def _round(self, module: FakeQuant, x: Tensor, drop: float, rng: np.random.Generator | None) -> Tensor:
        scheme = module.scheme
        known = self.scales.get(id(module))
        scale = module.effective_scale() if known is None else F.maximum(F.abs(known[1]), SMALLEST_SCALE)
        even, zero = scheme.rounding == "half_even", module.effective_zero_point()
        bounds = scheme.qmin, scheme.qmax
        y = quant_dequant(
            module.shaped(x), scale, zero, *bounds, even, module.shape, None if known is None else Learn()
        )
        if rng is None or drop == 0.0:
            return y
        kept = Tensor((rng.random(tuple(int(n) for n in x.shape), np.float32) >= drop).astype(np.float32))
        return x + (y - x) * kept

    def noise(self, data: _Data, weights: list[np.ndarray]) -> Noise:
        """The error of the block's outputs with these weights, on all data."""
        for state, weight in zip(self.layers, weights, strict=True):
            state.parameter._reset(Parameter(weight))
        found = Noise(self.block.name)
        for part in data.parts:
            exits = self.forward(part[: data.entries], 0.0, None)
            for want, have in zip(part[2 * data.entries :], exits, strict=True):
                found.add(want, have.numpy())
        return found

    def state(self) -> list[np.ndarray]:
        """The weights and all scales that the result depends on."""
        weights = [get_module(self.twins.quantized.traced, state.layer.weight) for state in self.layers]
        quants = [state.layer.quant for state in self.layers]
        quants += [m for e in self.block.exprs if isinstance(m := owner(e), FakeQuant)]
        return [t.numpy() for t in (*weights, *(t for q in quants for t in (q.scale, q.zero_point)))]

    def set_scales(self, values: list[np.ndarray]) -> None:
        """Gives the learned scales these values."""
        for (_, scale), value in zip(self.scales.values(), values, strict=True):
            scale._reset(Parameter(value))

    def store_scales(self) -> None:
        """Gives the fake quants the scales that were learned."""
        for module, scale in self.scales.values():
            value = np.maximum(np.abs(scale.numpy()), SMALLEST_SCALE).reshape((-1,) if module.shape else ())
            zero = module.effective_zero_point().numpy().reshape(value.shape).astype(np.int32)
            module.set_qparams(QParams(module.scheme, value.astype(np.float32), zero))


def _own_scales(task: CalibratedTask, block: Block) -> list[FakeQuant]:
    """The fake quants of activations that are called in the block and nowhere else."""
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


def _descend(run: _Run, data: _Data, settings: Settings, unit: float) -> None:
    """Takes all steps; ``unit`` is the mean squared error that counts as 1."""
    rng = np.random.default_rng([settings.seed, zlib.crc32(run.block.name.encode())])
    roundings = [Adam(state.rounding.v, settings.lr) for state in run.layers]
    learned = list(run.scales.values()) if settings.scale_lr else []
    values = [scale.numpy().copy() for _, scale in learned]
    scales = [Adam(v, settings.scale_lr * v.copy()) for v in values]
    parameters = [state.parameter for state in run.layers] + [scale for _, scale in learned]
    manager = GradManager().attach(parameters)
    for step in range(settings.iterations):
        done = step / settings.iterations
        for state in run.layers:
            state.parameter._reset(Parameter(state.rounding.soft()))
        loss = _backward(run, data, settings, rng, manager, unit)
        if not math.isfinite(loss):
            raise CalibrationError(
                f"the loss of {run.block.name} is {loss} in step {step + 1}: the model is left as it was; "
                "try a lower lr, and look at the calibration data."
            )
        beta = annealed(done, settings.warmup, settings.beta)
        for state, adam in zip(run.layers, roundings, strict=True):
            strength = 0.0 if beta is None else settings.strength
            adam.step(state.rounding.gradient(state.parameter.grad.numpy(), beta or 2.0, strength))
            state.parameter.grad = None
        factor = 0.5 * (1.0 + math.cos(math.pi * done))
        for (_, scale), adam in zip(learned, scales, strict=True):
            adam.step(scale.grad.numpy(), factor)
            scale.grad = None
            scale._reset(Parameter(adam.value))


def _backward(
    run: _Run, data: _Data, settings: Settings, rng: np.random.Generator, manager: GradManager, unit: float
) -> float:
    """Computes the gradients of one step; returns the loss."""
    drawn = data.draw(rng, settings.batch)
    n = data.entries
    entries = drawn[:n]
    if settings.drop:
        entries = [
            np.where(rng.random(r.shape, np.float32) < settings.drop, e, r)
            for r, e in zip(entries, drawn[n : 2 * n], strict=True)
        ]
    with manager:
        exits = run.forward(entries, settings.drop, rng)
        errors = [F.sum((h - Tensor(w)) ** 2) for h, w in zip(exits, drawn[2 * n :], strict=True)]
        loss = sum(errors[1:], errors[0]) / (unit * sum(w.size for w in drawn[2 * n :]))
        manager.backward(loss)
    return float(loss.numpy())

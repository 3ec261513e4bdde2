"""The steps of learned rounding: what is drawn for a step, and the loss of a block with its gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from megengine import Parameter, Tensor

from qtrace.graph.opaque import OpaqueOp
from qtrace.graph.walk import owner
from qtrace.learning import MIN_TRACED_STEPS, LearningEngine, LearningStep, MegEngineEngine
from qtrace.ptq.rounding.block_run import BlockData, BlockRun

__all__ = ["BlockGradients", "DescentSettings", "MegEngineGradients"]


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

"""The base class of the algorithms that learn the roundings of weights."""

from __future__ import annotations

import abc
from typing import Annotated

import numpy as np
from pydantic import AfterValidator, Field

from qtrace.display import progress_bar
from qtrace.graph.types import TracedModule
from qtrace.graph.walk import get_module
from qtrace.learning.engine import queueless
from qtrace.plugins.options import Float, Int
from qtrace.ptq.base import CalibratedAlgorithm, CalibratedTask, Left, Report
from qtrace.ptq.layers.quantized import LayerTwins, QuantizedLayer, quantized_layers
from qtrace.ptq.rounding.blocks import Block, single_layers
from qtrace.ptq.rounding.blockwise import LearnedBlock, learn
from qtrace.ptq.rounding.gradients import DescentSettings

__all__ = ["LearnedRounding"]


def _falling(values: tuple[float, ...]) -> tuple[float, ...]:
    if len(values) != 2 or not values[0] >= values[1] >= 1:
        raise ValueError("beta is two numbers, from high to low, none below 1.")
    return values


class LearnedRounding(CalibratedAlgorithm):
    """Abstract base: learns the blocks of a graph in order, each on the outputs of the blocks before.

    Attributes:
        iterations: steps for each block.
        batch: images in a step.
        lr: learning rate of the roundings; by default 20 / iterations, but 0.1 at most.
        warmup: the share of the steps before the regularizer starts.
        beta: the exponent of the regularizer at its start and at the end.
        strength: the factor of the regularizer's mean over the weights, next to a relative error.
        seed: the seed of the drawn images and masks.
        samples: see `CalibratedAlgorithm`; with fewer samples the roundings overfit.
    """

    samples: Annotated[Int, Field(ge=1)] = 256
    iterations: Annotated[Int, Field(gt=0)] = 1000
    batch: Annotated[Int, Field(gt=0)] = 32
    lr: Annotated[Float, Field(gt=0)] | None = None
    warmup: Annotated[Float, Field(ge=0, lt=1)] = 0.2
    beta: Annotated[tuple[Float, ...], AfterValidator(_falling)] = (20.0, 2.0)
    strength: Annotated[Float, Field(ge=0)] = 20.0
    seed: Annotated[Int, Field(ge=0)] = 0

    @abc.abstractmethod
    def blocks(self, model: TracedModule, layers: list[QuantizedLayer]) -> list[Block]:
        """Returns the blocks to learn, in graph order."""

    def learns_layers_first(self, block: Block) -> bool:
        """Whether each layer of ``block`` is learned by itself before the whole block."""
        return False

    def settings(self) -> DescentSettings:
        """Returns the settings of a block."""
        return DescentSettings(
            iterations=self.iterations,
            batch=self.batch,
            lr=self.lr,
            scale_lr=0.0,
            drop=0.0,
            warmup=self.warmup,
            beta=(self.beta[0], self.beta[1]),
            strength=self.strength,
            seed=self.seed,
        )

    def apply(self, task: CalibratedTask) -> Report:
        quantized, left = quantized_layers(task.model)
        blocks = self.blocks(task.model, quantized)
        settings, floats = self.settings(), _weights(task.model, quantized)
        changed: list[str] = []
        errors = []
        with queueless():
            twins = LayerTwins(task)
            name = type(self).__name__.lower()
            for block in progress_bar(blocks, desc=name, unit="block", disable=not task.progress):
                if self.learns_layers_first(block):
                    ahead = twins.fork(block.exprs[0])
                    for layer in single_layers(task.model, block.layers):
                        learn(task, ahead, layer, LearnedRounding.settings(self), floats)
                learned = learn(task, twins, block, settings, floats)
                errors.append(learned.error)
                changes, reasons = _describe_block(block, learned)
                changed += changes
                left += reasons
        if not blocks:
            left.append(Left("", "no layer has quantized weights"))
        return Report(tuple(changed), tuple(left), tuple(errors))


def _weights(model: TracedModule, layers: list[QuantizedLayer]) -> dict[str, np.ndarray]:
    """Copies the weights of layers, by path."""
    return {layer.weight: get_module(model, layer.weight).numpy().copy() for layer in layers}


def _describe_block(block: Block, learned: LearnedBlock) -> tuple[list[str], list[Left]]:
    if not learned.better:
        names = ", ".join(layer.name for layer in block.layers)
        return [], [Left(names, "rounding to nearest gives a smaller error")]
    lines = [f"{n}: {k} of {m} weights rounded the other way" for n, (k, m) in learned.turned.items()]
    if learned.scales:
        lines.append(f"{block.name}: {learned.scales} scales of activations learned")
    return lines, []

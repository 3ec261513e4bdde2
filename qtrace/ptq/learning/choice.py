"""The choice of the engine that computes the steps of learned rounding."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from megengine import Parameter

from qtrace.errors import CalibrationError, ConfigError, install
from qtrace.graph.types import TracedModule
from qtrace.ptq.learning.block_run import BlockData, BlockRun
from qtrace.ptq.learning.descent import DescentSettings, Gradients, LearningEngine, StepGradients

if TYPE_CHECKING:
    from qtrace.ptq.torch.graph import TorchGraph

__all__ = ["LEARNING_ENGINES", "choose_learning"]

LEARNING_ENGINES = ("auto", "megengine", "torch")

# Both engines agree on a step if the loss differs by no more than this share, and no gradient by more than
# this share of its length: a value that lies between two integers may be rounded either way.
_LOSS_TOLERANCE, _GRADIENT_TOLERANCE = 0.01, 0.1
_LOG = logging.getLogger("qtrace")


def choose_learning(model: TracedModule, requested: str = "auto") -> LearningEngine | None:
    """Chooses the engine of ``adaround`` and ``reconstruct``.

    Args:
        model: the calibrated graph.
        requested: ``auto``, ``megengine`` or ``torch``. ``auto`` takes torch if it is installed and every op
            has a form in torch.

    Returns:
        torch; None for MegEngine.

    Raises:
        ConfigError: for an unknown engine.
        CalibrationError: when torch is requested and does not apply.
    """
    if requested not in LEARNING_ENGINES:
        raise ConfigError(
            f"unknown learning engine {requested!r}: choose one of {', '.join(LEARNING_ENGINES)}."
        )
    if requested == "megengine":
        return None
    reason = f"it is not installed ({install('torch')})"
    if importlib.util.find_spec("torch") is not None:
        from qtrace.ptq.torch.graph import TorchGraph, UnsupportedError

        try:
            return _TorchLearning(TorchGraph(model))
        except UnsupportedError as error:
            reason = str(error)
    if requested == "torch":
        raise CalibrationError(f"the learning engine torch does not apply: {reason}; use megengine, or auto.")
    return None


class _TorchLearning:
    """Learns in torch each block on whose first step both engines agree."""

    def __init__(self, graph: TorchGraph) -> None:
        self._graph = graph

    def gradients(
        self,
        run: BlockRun,
        data: BlockData,
        settings: DescentSettings,
        parameters: Sequence[Parameter],
        unit: float,
    ) -> StepGradients | None:
        """Returns the function that computes a step; see `LearningEngine`."""
        from qtrace.ptq.torch.block import TorchGradients
        from qtrace.ptq.torch.graph import UnsupportedError

        fast = TorchGradients(self._graph, run, data, settings, parameters, unit)
        slow = Gradients(run, data, settings, parameters, unit, traced=False)
        try:
            reason = _find_difference(*(g(np.random.default_rng(0), settings.drop) for g in (slow, fast)))
        except UnsupportedError as error:
            reason = str(error)
        if reason:
            _LOG.info(f"MegEngine learns {run.block.name}: in torch {reason}")
        return None if reason else fast


def _find_difference(slow: tuple[float, list[np.ndarray]], fast: tuple[float, list[np.ndarray]]) -> str:
    """Says in a clause what differs between a step of both engines; "" if they agree."""
    if not abs(slow[0] - fast[0]) <= _LOSS_TOLERANCE * abs(slow[0]):
        return f"its first loss is {fast[0]:.6g}, not {slow[0]:.6g}"
    for index, (a, b) in enumerate(zip(slow[1], fast[1], strict=True)):
        if not np.linalg.norm(a - b) <= _GRADIENT_TOLERANCE * np.linalg.norm(a):
            return f"the gradient of parameter {index} differs in the first step"
    return ""

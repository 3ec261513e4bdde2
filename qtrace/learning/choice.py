"""The choice of the engine that computes the steps of what learns."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from types import FunctionType
from typing import TypeVar

from qtrace.errors import CalibrationError, ConfigError, install
from qtrace.graph.types import TracedModule
from qtrace.learning.engine import LearningEngine, UnsupportedError
from qtrace.plugins import load_object

__all__ = ["ENGINES", "choose_learning", "try_torch"]

ENGINES = ("auto", "megengine", "torch")

_T = TypeVar("_T")


def try_torch(build: Callable[[], _T]) -> tuple[_T | None, str]:
    """Returns what ``build`` makes with torch; None, and the reason as a clause, if torch does not apply.

    Args:
        build: imports torch; it may raise an `UnsupportedError`.
    """
    if importlib.util.find_spec("torch") is None:
        return None, f"it is not installed ({install('torch')})"
    try:
        return build(), ""
    except UnsupportedError as error:
        return None, str(error)


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
    if requested not in ENGINES:
        raise ConfigError(f"unknown learning engine {requested!r}: choose one of {', '.join(ENGINES)}.")
    if requested == "megengine":
        return None

    def build() -> LearningEngine:
        engine: LearningEngine = load_object("qtrace.engines", "torch", FunctionType)(model)
        return engine

    torch, reason = try_torch(build)
    if torch is None and requested == "torch":
        raise CalibrationError(f"the learning engine torch does not apply: {reason}; use megengine, or auto.")
    return torch

"""Phases: what the fake quants of a prepared graph do. Switching them never changes the graph."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import megengine as mge
from megengine.module import LSTM, LSTMCell, Module

from qtrace.errors import CalibrationError, ConfigError, QtraceWarning
from qtrace.fakequant.base import PHASES
from qtrace.graph.opaque import say_stopped_gradients
from qtrace.graph.types import Expr, TracedModule
from qtrace.graph.walk import exprs, owner
from qtrace.plugins.options import check_arguments
from qtrace.preparation.model import QuantizedModel, fake_quants, followers, is_quantized


@check_arguments
def set_phase(prepared: Module, phase: str) -> None:
    """Sets the phase of every site of ``prepared``.

    ``float`` passes values through; ``observe`` also records them; ``quantize`` rounds with frozen
    parameters; ``train`` rounds, with gradients, and learned ranges learn. A ``jit.trace`` captured in one
    phase must be captured again in another.

    Parameters may come from ``calibrate`` or from the state dict of a calibrated module. Entering ``train``
    on CPU warns (`QtraceWarning`) unless ``megengine.config.async_level`` is 0. Entering it with a
    recurrent layer of MegEngine's own that ``prepare`` has left, or with an opaque node after parameters,
    which no gradient passes, warns in any case.

    Args:
        prepared: a module made by ``qtrace.prepare``, or one that holds such modules next to float ones.
        phase: one of the four names.

    Raises:
        ConfigError: for an unknown phase.
        GraphError: when the module is not prepared and holds none that is.
        CalibrationError: for ``quantize`` and ``train`` when a site lacks parameters.
    """
    if phase not in PHASES:
        raise ConfigError(f"unknown phase {phase!r}; known: {', '.join(PHASES)}.")
    switch_phase(phase, *_prepared_parts(prepared))


def switch_phase(phase: str, *parts: QuantizedModel) -> None:
    """Sets the phase of every site of ``parts``.

    Args:
        phase: one of the four names that `set_phase` takes.
        parts: views of prepared modules.

    Raises:
        CalibrationError: for ``quantize`` and ``train`` when a site lacks parameters.
    """
    if phase in ("quantize", "train"):
        missing = [fq.site for part in parts for fq in part.fake_quants.values() if not fq.calibrated]
        if missing:
            raise CalibrationError(
                f"{len(missing)} sites lack quantization parameters, the first is {missing[0]}: "
                f"run qtrace.calibrate on data before the phase {phase!r}."
            )
    if phase == "train":
        _warn_of_races(parts)
        _warn_of_gradients(parts)
    for part in parts:
        for module in (*part.fake_quants.values(), *part.followers):
            module.phase = phase


def _prepared_parts(module: Module) -> list[QuantizedModel]:
    """Finds the prepared modules that ``module`` is or contains.

    Raises:
        GraphError: when there is no prepared module, or one is converted.
    """
    parts = [part for part in module.modules() if is_quantized(part)] if isinstance(module, Module) else []
    return [QuantizedModel(part, "prepared") for part in parts or [module]]


@contextmanager
def in_phase(model: TracedModule, phase: str) -> Iterator[None]:
    """Sets the phase of every site of a prepared or converted module, and restores the old ones on exit."""
    modules = (*fake_quants(model), *followers(model))
    old_phases = [module.phase for module in modules]
    try:
        for module in modules:
            module.phase = phase
        yield
    finally:
        for module, old_phase in zip(modules, old_phases, strict=True):
            module.phase = old_phase


def _warn_of_races(parts: Sequence[QuantizedModel]) -> None:
    """Warns if MegEngine would compute gradients asynchronously on CPU: 1.13 computes some of them wrong."""
    level = mge.config.async_level
    devices = {str(fq.scale.device.physical_name) for part in parts for fq in part.fake_quants.values()}
    if level > 0 and any(device.startswith(("cpu", "multithread")) for device in devices):
        warnings.warn(
            f"MegEngine computes wrong gradients on CPU now and then at async_level {level}: "
            "set megengine.config.async_level = 0 before you train.",
            QtraceWarning,
            stacklevel=5,
        )


def has_wrong_gradient(expr: Expr) -> bool:
    """Returns whether ``expr`` calls a recurrent layer of MegEngine's own, whose gradient 1.13 has wrong."""
    return isinstance(owner(expr), (LSTM, LSTMCell))


def say_wrong_gradients(traced: TracedModule) -> str:
    """Returns a sentence on a layer of MegEngine's own whose gradient 1.13 computes wrong; "" without one."""
    layers = [owner(expr) for expr in exprs(traced) if has_wrong_gradient(expr)]
    if not layers:
        return ""
    name, kind = getattr(layers[0], "_name", None) or "a layer", type(layers[0]).__name__
    return (
        f"{name} is of type {kind}, whose gradient is wrong in MegEngine on CPU: write the layer with "
        "F.linear, F.split, F.sigmoid and F.tanh to train it."
    )


def _warn_of_gradients(parts: Sequence[QuantizedModel]) -> None:
    """Says which layers have wrong gradients, and which opaque nodes a gradient would have to pass."""
    graphs = [part.module for part in parts]
    for sentence in (*map(say_wrong_gradients, graphs), *map(say_stopped_gradients, graphs)):
        if sentence:
            warnings.warn(sentence, QtraceWarning, stacklevel=5)

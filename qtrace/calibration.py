"""calibrate: shows data to the observers and takes the quantization parameters from them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from megengine import Tensor
from tqdm import tqdm

from qtrace.batches import as_arguments, evaluating, told
from qtrace.errors import CalibrationError
from qtrace.fakequant._bias import BIAS_LIMIT
from qtrace.fakequant.base import FakeQuant
from qtrace.graph.types import TracedModule
from qtrace.observers.base import Observer
from qtrace.passes.record import fake_quants, followers, read_record
from qtrace.phases import set_phase
from qtrace.ptq._running import calibrated_algorithms, restoring, run_calibrated
from qtrace.ptq.base import Batches
from qtrace.scheme import QParams

__all__ = ["calibrate"]


def calibrate(
    prepared: TracedModule, batches: Iterable[Any], max_batches: int | None = None, progress: bool = True
) -> TracedModule:
    """Runs ``batches`` through the graph, records every site and sets its quantization parameters.

    Statistics of an earlier calibration are forgotten. Algorithms of the config's ``ptq`` that work with data
    (`bias_correction` ...) run at the end and read the batches again; ``explain`` shows their reports. The
    batches run in eval mode, and every module gets its training flag back. The module is left in the phase
    ``quantize``; on an error or an interruption it is left as it was.

    Args:
        prepared: a module made by ``qtrace.prepare``; it is calibrated in place.
        batches: Tensors or arrays, or tuples (positional) or dicts (keyword) of them. Not an iterator, where
            an algorithm reads the data again.
        max_batches: how many batches to take at most; None for all.
        progress: whether to show a progress bar with the time left, on stderr.

    Returns:
        ``prepared``.

    Raises:
        CalibrationError: when there is no batch, a batch does not fit the model, or a value is NaN or
            infinite, naming site and batch.
    """
    record = read_record(prepared, "prepared")
    _check_arguments(batches, max_batches)
    algorithms = calibrated_algorithms(record, batches)
    sites = list(fake_quants(prepared))
    before = [fq.observer for fq in sites]
    phases = [(module, module.phase) for module in (*sites, *followers(prepared))]
    try:
        for fq in sites:
            fq.observer = fresh(fq)
        set_phase(prepared, "observe")
        with evaluating(prepared):
            count = _observe(prepared, sites, batches, max_batches, progress)
        if count == 0:
            raise CalibrationError("calibration data has no batches: give at least one.")
        parameters = [(fq, fq.observer.qparams()) for fq in sites if fq.observer and not fq.observer.empty]
        with restoring(prepared), evaluating(prepared):
            for fq, qparams in parameters:
                fq.set_qparams(qparams)
            _fit_biases(prepared)
            set_phase(prepared, "quantize")
            run_calibrated(prepared, algorithms, Batches(batches, prepared, max_batches), progress)
    except BaseException:
        for fq, observer in zip(sites, before, strict=True):
            fq.observer = observer
        for module, phase in phases:
            module.phase = phase
        raise
    return prepared


def _check_arguments(batches: Any, max_batches: Any) -> None:
    whole = isinstance(max_batches, int) and not isinstance(max_batches, bool) and max_batches > 0
    if max_batches is not None and not whole:
        raise CalibrationError(f"max_batches is {max_batches!r}: give a whole number above 0, or None.")
    if isinstance(batches, (Tensor, np.ndarray, Mapping, str)) or not isinstance(batches, Iterable):
        raise CalibrationError(
            f"batches is one {type(batches).__name__}: give an iterable of batches, such as a list of arrays."
        )


def fresh(fq: FakeQuant) -> Observer:
    """A new observer of the kind that ``fq`` has, without data."""
    assert fq.observer is not None
    return type(fq.observer)(fq.observer.scheme, **fq.observer.options)


def _observe(
    prepared: TracedModule, sites: list[FakeQuant], batches: Iterable[Any], limit: int | None, progress: bool
) -> int:
    total = len(batches) if hasattr(batches, "__len__") else None  # type: ignore[arg-type]
    if limit is not None:
        total = limit if total is None else min(limit, total)
    count = 0
    taken = itertools.islice(batches, limit)
    for batch in tqdm(taken, total=total, desc="calibrate", unit="batch", disable=not progress):
        args, kwargs = as_arguments(batch, prepared, count)
        for fq in sites:
            fq.batch = count
        with told(prepared, (args, kwargs), count):
            prepared(*args, **kwargs)
        count += 1
    return count


def _fit_biases(prepared: TracedModule) -> None:
    """Widens weight scales that are so small that their layer's bias would not fit into int32."""
    from qtrace.passes.insert import CONTAINER

    annotation = read_record(prepared).annotation
    container = getattr(prepared, CONTAINER)
    values = {e.outputs[0].name: e for e in prepared.graph._exprs}
    for site in annotation.sites:
        if site.sort != "bias":
            continue
        activation, weight = getattr(container, site.activation), getattr(container, site.weight)
        bias = values[site.node].interpret(prepared)[0].numpy().astype(np.float64).reshape(-1)
        if not (activation.calibrated and weight.calibrated):
            continue
        need = np.abs(bias) / (float(activation.qparams().scale) * site.factor * BIAS_LIMIT)
        have = weight.qparams()
        floor = need if have.scale.ndim else need.max()
        if np.any(floor > have.scale):
            scale = np.maximum(have.scale, floor).astype(np.float32)
            weight.set_qparams(QParams(have.scheme, scale, have.zero_point))

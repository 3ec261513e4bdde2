"""Sites that are given, as in a quantized file: a prepared, calibrated module without any data.

`tensors` describes given roundings, `marks` takes the roundings out of a graph, `sites` places one site for
each of them, and `quantize_as_file` makes the prepared module and checks that no integer has changed.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from qtrace.config import QConfig
from qtrace.errors import SHOWN_LINES, GraphError, shorten_list
from qtrace.graph.dataflow import evaluate_fixed
from qtrace.graph.flatten import flatten
from qtrace.graph.lint import check
from qtrace.graph.types import TracedModule
from qtrace.numerics import expand_blocks
from qtrace.preparation.model import QuantizedModel, QuantizedSite
from qtrace.preparation.passes.expand import expand
from qtrace.preparation.passes.insert import insert
from qtrace.preparation.passes.quantized_file.marks import take_marks
from qtrace.preparation.passes.quantized_file.sites import FileRoundings, decide
from qtrace.preparation.passes.quantized_file.tensors import FileRounding, StoredGrid
from qtrace.preparation.phases import switch_phase
from qtrace.preparation.record import Record, write_record
from qtrace.scheme import QParams

__all__ = ["FileRounding", "StoredGrid", "quantize_as_file"]


def quantize_as_file(
    traced: TracedModule, parameters: Mapping[str, StoredGrid], config: QConfig | None = None
) -> TracedModule:
    """Makes a prepared module whose sites and quantization parameters are exactly the given ones.

    Args:
        traced: a traced module; calls of `FileRounding` stand where activations are rounded.
        parameters: path of a parameter -> the grid of its values, and the integers of a bias.
        config: gives the backend, and the observers and fake quants of later calibration and training.

    Returns:
        A calibrated module in the phase ``quantize``, as after ``prepare`` and ``calibrate``.

    Raises:
        GraphError: when roundings lack an equal site, or re-quantized values have other integers than the
            given ones; the message names all of them.
    """
    config = config or QConfig()
    model = flatten(traced)
    expanded = expand(model)
    marks = take_marks(model)
    given = FileRoundings(model, marks, parameters, config)
    annotation = decide(given)
    _refuse(given.problems)
    insert(model, annotation)
    check(model)
    log = (*expanded.changed, *(f"left: {reason}" for reason in expanded.left))
    write_record(model, Record("prepared", annotation, config.to_dict(), log))
    view = QuantizedModel(model, "prepared")
    for name, fake_quant in view.fake_quants.items():
        fake_quant.set_qparams(given.qparams[name])
    _refuse(_changed_integers(view, given))
    switch_phase("quantize", view)
    return model


def _changed_integers(view: QuantizedModel, given: FileRoundings) -> list[str]:
    """Returns a sentence for each site whose parameters or integers are not the given ones."""
    problems = []
    for name, fake_quant in view.fake_quants.items():
        if fake_quant.qparams() != given.qparams[name]:
            problems.append(f"{given.label(name)} has a scale that is too small for float32 arithmetic")
    stored = [site for site in view.sites if site.static and site.name in given.stored]
    values = evaluate_fixed(view.module, (site.node for site in stored))
    for site in stored:
        grid = given.stored[site.name]
        if not _keeps(site, values[site.node].numpy(), grid):
            scales = "the product of the scales of input and weight" if site.sort == "bias" else "its scale"
            problems.append(f"{grid.label} has other integers when its values are divided by {scales}")
    return problems


def _keeps(site: QuantizedSite, value: np.ndarray, grid: StoredGrid) -> bool:
    """Returns whether re-quantizing the stored floats gives the integers again."""
    integers = site.integers(value)
    if site.sort == "bias":
        return grid.integers is not None and np.array_equal(integers.reshape(-1), grid.integers.reshape(-1))
    qparams: QParams = site.qparams
    if qparams.scheme.block is not None:
        scale, zero = expand_blocks(qparams, value.shape)
    elif not qparams.scheme.per_channel:
        scale, zero = qparams.scale, qparams.zero_point
    else:
        axes = site.fake_quant.counted_axes
        shape = [n if axis in axes else 1 for axis, n in enumerate(value.shape)]
        scale, zero = qparams.scale.reshape(shape), qparams.zero_point.reshape(shape)
    again = ((integers - zero).astype(np.float32) * scale).astype(np.float32)
    return np.array_equal(again, value)


def _refuse(problems: list[str]) -> None:
    if problems:
        shown = shorten_list(problems, "; ", SHOWN_LINES)
        raise GraphError(f"{len(problems)} roundings lack an equal site: {shown}.")

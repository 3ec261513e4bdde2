"""Test vectors for firmware: inputs, and the integers that every site must have, as raw files and .npz."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from qtrace.data.batches import as_arguments, check_batches, evaluating, refuse_nan, translate_errors
from qtrace.errors import CalibrationError, ExportError
from qtrace.extras.device.dumped import KINDS, file_name
from qtrace.graph.types import TracedModule
from qtrace.graph.walk import op_label
from qtrace.preparation.model import QuantizedModel
from qtrace.process import on_engine_thread
from qtrace.scheme import QParams, QScheme
from qtrace.storage.checkpoints import pack_arrays
from qtrace.storage.files import parse_document, replace_folder, temporary_folder
from qtrace.verification.runs import GraphRun, activations, integer_qparams, output_names

__all__ = ["SCHEMA", "write_vectors"]

SCHEMA = "qtrace-vectors/1"


@on_engine_thread
def write_vectors(
    converted: TracedModule, folder: str | os.PathLike[str], batches: Iterable[Any], count: int
) -> Path:
    """Writes test vectors: for each batch its inputs, the integers of every site and the outputs.

    ``0000.npz`` holds the tensors of the first batch, as ``inputs/NAME``, ``sites/NAME`` and
    ``outputs/NAME``. The folder ``0000`` holds the same as raw files, little endian and without header.
    ``index.json`` has their types, shapes, scales and zero points, in the order of computation.
    ``inputs.npz`` has the inputs of all batches, samples first, as data for `verify`.

    Args:
        converted: the converted module.
        folder: the folder to write; an existing one that holds vectors is replaced.
        batches: inputs as for ``qtrace.calibrate``.
        count: how many batches to take.

    Returns:
        The folder.

    Raises:
        CalibrationError: when there are fewer batches, or one does not fit the model or holds NaN.
        ExportError: when the folder cannot be written, or something else stands there.
    """
    target, model = Path(folder), QuantizedModel(converted, "converted")
    check_batches(batches)
    if target.exists() and not _holds_vectors(target):
        raise ExportError(f"{target} exists and holds no test vectors: name another folder.")
    try:
        with temporary_folder(target) as partial:
            _write_all(model, partial, batches, count)
            replace_folder(target, partial)
    except OSError as error:
        raise ExportError(f"{target} cannot be written: {error.strerror or error}.") from error
    return target


def _holds_vectors(folder: Path) -> bool:
    """Whether a folder has the index that `write_vectors` writes."""
    try:
        return parse_document((folder / "index.json").read_bytes()).get("schema") == SCHEMA
    except (OSError, ValueError):
        return False


def _write_all(model: QuantizedModel, folder: Path, batches: Iterable[Any], count: int) -> None:
    inputs: list[list[np.ndarray]] = []
    entries: list[dict[str, Any]] = []
    with evaluating(model.module):
        for number, batch in enumerate(batches):
            if number == count:
                break
            run = _run(model, batch, number)
            tensors = dict(_tensors(model, run))
            entries = [_entry(model, name, value) for name, value in tensors.items()]
            inputs.append(run.inputs)
            _write_batch(folder, f"{number:04d}", tensors)
    if len(inputs) < count:
        raise CalibrationError(f"there are {len(inputs)} batches for {count} test vectors: give more data.")
    stacked = (np.concatenate(values) for values in zip(*inputs, strict=True))
    arrays = pack_arrays(dict(zip(_input_names(model), stacked, strict=True)))
    (folder / "inputs.npz").write_bytes(arrays)
    index = {"schema": SCHEMA, "vectors": [f"{n:04d}" for n in range(count)], "tensors": entries}
    (folder / "index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _run(model: QuantizedModel, batch: Any, number: int) -> GraphRun:
    """Runs the graph on one batch."""
    args, kwargs = as_arguments(batch, model.module, number)
    refuse_nan((args, kwargs), number, model.module)
    run = GraphRun(model, _written_nodes(model))
    with translate_errors(model.module, (args, kwargs), number):
        run.compute(args, kwargs)
    return run


def _input_names(model: QuantizedModel) -> list[str]:
    return [node.name for node in model.module.graph.inputs[1:]]


def _written_nodes(model: QuantizedModel) -> dict[str, str]:
    """Maps each node whose integers are written to the name of its site, or of itself if it moves some."""
    sites = {node: site.name for node, site in activations(model).items() if not site.static}
    return {**sites, **{name: name for name in model.annotation.moved()}}


def _tensors(model: QuantizedModel, run: GraphRun) -> Iterator[tuple[tuple[str, str], np.ndarray]]:
    """Yields kind, name and value of each tensor of a batch; sites in the order of computation."""
    for name, value in zip(_input_names(model), run.inputs, strict=True):
        yield ("inputs", name), value
    names = _written_nodes(model)
    for node, value in run.integers.items():
        yield ("sites", names[node]), value.astype(_storage(run.qparams[node].scheme))
    for name, value in zip(output_names(model), run.outputs, strict=True):
        yield ("outputs", name), value


def _entry(model: QuantizedModel, tensor: tuple[str, str], value: np.ndarray) -> dict[str, Any]:
    """Returns the entry of one tensor in the index."""
    kind, name = tensor
    entry: dict[str, Any] = {"name": name, "kind": kind, "file": f"{kind}/{file_name(name)}.raw"}
    entry.update(dtype=value.dtype.name, shape=list(value.shape))
    if kind != "sites":
        return entry
    node = next(node for node, written in _written_nodes(model).items() if written == name)
    site, qparams = model.rounded.get(node), integer_qparams(model)[node]
    source = model.nodes[node] if site is None else site.source
    return {**entry, "op": op_label(source.expr), **_parameters(qparams)}


def _parameters(qparams: QParams) -> dict[str, Any]:
    scheme = qparams.scheme
    return {
        "bits": scheme.bits,
        "scale": float(np.ravel(qparams.scale)[0]),
        "zero_point": int(np.ravel(qparams.zero_point)[0]),
    }


def _storage(scheme: QScheme) -> Any:
    """Returns the type that holds integers of a scheme: 8 bits, or 16 for wider schemes."""
    if scheme.bits <= 8:
        return np.int8 if scheme.signed else np.uint8
    return np.int16 if scheme.signed else np.uint16


def _write_batch(folder: Path, name: str, tensors: dict[tuple[str, str], np.ndarray]) -> None:
    """Writes the tensors of a batch as one archive and as raw files."""
    arrays = pack_arrays({f"{kind}/{file_name(n)}": v for (kind, n), v in tensors.items()})
    (folder / f"{name}.npz").write_bytes(arrays)
    for kind in KINDS:
        (folder / name / kind).mkdir(parents=True)
    for (kind, tensor), value in tensors.items():
        data = np.ascontiguousarray(value).astype(value.dtype.newbyteorder("<"))
        (folder / name / kind / f"{file_name(tensor)}.raw").write_bytes(data.tobytes())

"""Stored tensors in fewer bytes, without a change of a number.

Tensors that the imported file computes of constants, written as the nodes that compute them.

An import stores what a file computes of constants, such as a grid of places or a mask. Runtimes do so, too,
when they load a file; the file itself is smaller if it says how.

Tables of floats that are integers of 8 bits, less a zero point, times a scale, written as integers.

A file may store the rows of a table in 8 bits. Its float graph has the same numbers as floats, so the export
finds the integers again: exactly, or the table stays as it is. Only the rows that are read become floats.
"""

from __future__ import annotations

import base64
import contextlib
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from qtrace.errors import ExportError
from qtrace.export.onnx.exporter import OnnxExporter
from qtrace.export.onnx.opset import CopiedVersions, SourceVersions
from qtrace.graph.origin import hash_values, read_origin
from qtrace.graph.types import GetAttr
from qtrace.onnxfile.fragment import check_fragment
from qtrace.onnxfile.model import OnnxEditor, rename_tensors

__all__ = ["write_computed", "write_integer_tables"]

_ELEMENTWISE = {"Add", "Sub", "Mul", "Div", "Max", "Min", "Pow", "Where", "Concat", "Expand", "Identity"}
"""What takes computed operands in every runtime, where a layer may need a stored weight."""


def write_computed(model: Any, exporter: OnnxExporter, integers: bool) -> None:
    """Writes stored operands of elementwise ops as the nodes of the imported file that compute them.

    Args:
        model: the model; it is changed in place.
        exporter: what wrote the model.
        integers: whether the target takes computed integers before a DequantizeLinear, too.
    """
    origin = read_origin(exporter.graph.module)
    programs = {} if origin is None else origin.programs
    if not programs:
        return
    editor, graph = OnnxEditor(model), model.graph
    values = {n.expr.name: v for n, v in exporter.graph.values.items() if isinstance(n.expr, GetAttr)}
    for tensor in list(graph.initializer):
        path = exporter.paths.get(tensor.name, "")
        if path not in programs or path not in values or tensor.name in editor.output_names:
            continue
        own, (key, text) = values[path], programs[path]
        if hash_values(own) != key:  # training or another pass has changed it
            continue
        readers = editor.readers.get(tensor.name, [])
        pair = _rounding(editor, tensor, own) if integers else None
        if pair is not None:
            readers = editor.readers.get(pair.output[0], [])
        stored = numpy_helper.to_array(tensor)
        same = stored.dtype == own.dtype and np.array_equal(stored, own)
        if not (same or pair) or not readers or not {r.op_type for r in readers} <= _ELEMENTWISE:
            continue
        data = base64.b64decode(text)
        if len(data) >= tensor.ByteSize() or check_fragment(data):
            continue
        program = onnx.load_from_string(data)
        with contextlib.suppress(ExportError):  # no form of an op in that opset
            program = CopiedVersions(editor.opset, SourceVersions()).converted(program, tensor.name)
            graph.initializer.remove(tensor)
            _insert(editor, program.graph, tensor.name, pair)
    editor.finish()


def _rounding(editor: OnnxEditor, tensor: Any, values: np.ndarray) -> Any:
    """Returns the DequantizeLinear of stored integers that are these values, rounded; else None."""
    readers = editor.readers.get(tensor.name, [])
    pair = readers[0] if len(readers) == 1 else None
    if pair is None or pair.op_type != "DequantizeLinear" or len(pair.input) != 3:
        return None
    levels, scale, zero = (numpy_helper.to_array(editor.stored[name]) for name in pair.input)
    if scale.size > 1 or levels.dtype.kind not in "iu" or levels.shape != values.shape:
        return None
    limits = np.iinfo(levels.dtype)
    rounded = np.clip(np.rint(values / scale) + zero.astype(np.float32), limits.min, limits.max)
    return pair if np.array_equal(rounded, levels) else None


def _insert(editor: OnnxEditor, program: Any, output: str, pair: Any) -> None:
    """Adds the nodes of a program before all others, and a rounding of the result for a DequantizeLinear."""
    results = [name for node in program.node for name in node.output if name]
    tensors = [*(tensor.name for tensor in program.initializer), *results]
    renamed = {old: editor.fresh(f"{output}_{old}") for old in tensors}
    if pair is None:
        renamed[program.output[0].name] = output
    for tensor in program.initializer:
        tensor.name = renamed[tensor.name]
    for node in program.node:
        rename_tensors(node, renamed)
        node.name = node.output[0]
    nodes = list(program.node)
    if pair is not None:
        result = renamed[program.output[0].name]
        nodes.append(helper.make_node("QuantizeLinear", [result, *pair.input[1:]], [output], name=output))
    editor.graph.initializer.extend(program.initializer)
    editor.set_nodes([*nodes, *editor.nodes()])


def write_integer_tables(model: Any) -> None:
    """Writes tables that only look-ups of rows read as integers, in place, where no number changes."""
    editor = OnnxEditor(model)
    for tensor in list(model.graph.initializer):
        readers = editor.readers.get(tensor.name, [])
        looked_up = all(
            node.op_type == "Gather" and node.input[0] == tensor.name and not any(a.i for a in node.attribute)
            for node in readers
        )
        if not readers or not looked_up or tensor.data_type != TensorProto.FLOAT or len(tensor.dims) != 2:
            continue
        found = _integers(numpy_helper.to_array(tensor))
        if found is None:
            continue
        nodes = sum(3 * node.ByteSize() for node in readers)  # that many nodes make the floats
        if found[0].nbytes + found[1].nbytes + nodes >= tensor.ByteSize():
            continue
        names = [
            editor.store(f"{tensor.name}_{end}", part)
            for part, end in zip(found, ("int", "scale", "zero"), strict=True)
            if end != "zero" or part
        ]
        for node in readers:
            _look_up(editor, node, names, found[1].ndim > 1)
    editor.drop_unread()
    editor.finish()


def _look_up(editor: OnnxEditor, node: Any, names: list[str], by_row: bool) -> None:
    """Lets a Gather read integers, and makes floats of the rows that it gives."""
    integers, scales, *zero = names
    output, rows = editor.rename_result(node, "_rows")
    floats = editor.fresh(f"{output}_levels")
    node.input[0] = integers
    editor.add_after(node, helper.make_node("Cast", [rows], [floats], name=floats, to=TensorProto.FLOAT))
    if zero:
        floats, levels = editor.fresh(f"{output}_less"), floats
        editor.add_after(node, helper.make_node("Sub", [levels, *zero], [floats], name=floats))
    if by_row:
        row_scales = editor.fresh(f"{output}_scales")
        editor.add_after(
            node, helper.make_node("Gather", [scales, node.input[1]], [row_scales], name=row_scales)
        )
        scales = row_scales
    name = editor.fresh(f"{output}_scaled")
    editor.add_after(node, helper.make_node("Mul", [floats, scales], [output], name=name))


def _integers(table: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Returns integers of 8 bits, scales and one zero point that make a table; None without them.

    There is one scale, one for each column, or one for each row, of shape (rows, 1).
    """
    if not np.isfinite(table).all() or not table.size:
        return None
    for rows, back in ((table.reshape(1, -1), table.shape), (table, table.shape), (table.T, None)):
        if _levels(rows[:1, : table.shape[1]]) is None or (found := _levels(rows)) is None:
            continue
        levels, scales = found[0].reshape(back) if back else found[0].T, found[1]
        scales = scales.reshape(() if len(rows) == 1 else (-1, 1) if back else (-1,))
        zero = np.float32(0 if np.abs(levels + 0.5).max() < 128 else -levels.min())
        if levels.max() + zero <= np.iinfo(np.uint8).max:
            return (levels + int(zero)).astype(np.uint8 if zero else np.int8), scales, np.array(zero)
    return None


def _levels(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns the integers of rows and a scale for each; None if a row lacks them.

    Neighbours in order are one step apart, or several where levels are missing.
    """
    gaps = np.diff(np.sort(np.concatenate([rows, np.zeros((len(rows), 1), rows.dtype)], 1)))
    least = np.where(gaps > 0, gaps, np.inf).min(1).astype(np.float64)
    largest = np.abs(rows).max(1).astype(np.float64)
    integers, scales = np.zeros(rows.shape, np.int16), np.ones((len(rows), 1), np.float32)
    left, count = np.flatnonzero(largest), 0
    while left.size:
        count += 1
        last = np.rint(count * largest[left] / least[left])
        if (last > np.iinfo(np.uint8).max).any():
            return None
        near = (largest[left] / last).astype(np.float32)[:, None]
        done = np.zeros(len(left), bool)
        for scale in (near, np.nextafter(near, np.float32(0)), np.nextafter(near, np.float32(np.inf))):
            levels = np.rint(rows[left] / scale)
            exact = (levels * scale == rows[left]).all(1) & ~done
            integers[left[exact]], scales[left[exact]] = levels[exact], scale[exact]
            done |= exact
        left = left[~done]
    return integers, scales

"""ONNX in: a network in an ONNX file becomes a traced module, a quantized one a prepared module.

The stages: `model` reads the file into checked, frozen data, and `importer` walks its nodes in order. A node
whose inputs are all stored is folded (`folding`), and so is arithmetic on sizes. The graph computes sizes
where an op reads them and they depend on an open axis. Every other node is lowered by the table of `ops`, or
written as the nodes of its function body (`control_flow`). A node without an equal is collected, so that one
error names them all. `opening` leaves the axes open that the nodes allow.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx

from qtrace.errors import SHOWN_LINES, GraphError, ImportingError, shorten_list
from qtrace.graph.builder import GraphBuilder
from qtrace.graph.composites import compose
from qtrace.graph.interface import Interface, TensorInfo, read_interface, write_interface
from qtrace.graph.open_axes import OpenAxes, other_sizes, write_open_axes
from qtrace.graph.origin import write_origin
from qtrace.graph.passes import RemoveDeadCode
from qtrace.graph.tracing.copies import find_copies, insert_copies
from qtrace.graph.types import TensorNode, TracedModule
from qtrace.importing.onnx.float_weights import with_float_weights
from qtrace.importing.onnx.importer import Importer
from qtrace.importing.onnx.inputs import InputShape, axes_of, fix_axes, open_sizes, resolve_inputs
from qtrace.importing.onnx.layers import Scope
from qtrace.importing.onnx.model import (
    Computed,
    Graph,
    QuantizedIntegers,
    Sizes,
    Stored,
    Value,
    count_readers,
    load_model,
    load_structure,
    read_graph,
)
from qtrace.importing.onnx.naming import name_by_scopes, node_name
from qtrace.importing.onnx.opening import Opened, UnsupportedNodesError, build_open, open_axes_of
from qtrace.importing.onnx.origin import keep_own, list_names
from qtrace.importing.onnx.quantization import with_pairs
from qtrace.importing.onnx.rewriting import (
    cut,
    drop_unread,
    find_scales_and_shifts,
    join_biases,
    join_channel_biases,
    store_copies,
    without_strings,
)
from qtrace.plugins.options import check_arguments
from qtrace.preparation.passes.quantized_file import quantize_as_file
from qtrace.process import on_engine_thread, paused_collector
from qtrace.storage.files import parse_document

__all__ = ["declared_axes", "declared_inputs", "from_onnx", "open_inputs", "read_onnx"]

_LOG = logging.getLogger("qtrace")


@check_arguments
@on_engine_thread
def from_onnx(
    path: str | os.PathLike[str],
    shapes: Mapping[str, Sequence[int]] | None = None,
    *,
    batch: str | None = "auto",
    fixed: bool = False,
    outputs: Sequence[str] | None = None,
) -> TracedModule:
    """Reads a network from an ONNX file, as a flat traced module in eval mode.

    A quantized file (QuantizeLinear and DequantizeLinear, or ops such as QLinearConv) becomes a prepared and
    calibrated module. It has the sites, scales, zero points and integers of the file, as `prepare` and
    `calibrate` would have made it. `convert`, `verify`, `compare` and `finetune` take it. Layers whose only
    weights are integers (MatMulNBits) become float layers with the weights of the file. So do layers that
    round by the range of each batch (MatMulInteger, ConvInteger, DynamicQuantizeLSTM and others).

    Layers with stored weights become modules with parameters, in a tree that follows the names in the file.
    Ops that an exporter wrote in pieces become one call (`qtrace.graph.compose`). int64 is carried as int32,
    every other float type as float32. Open axes are
    checked at two other sizes against the file in onnxruntime, if that is installed; nothing else of it runs.

    Args:
        path: the file; external data lie in its folder.
        shapes: the shape of each input whose axes the file leaves open, by the input's name. The graph
            records these sizes; the axes stay open unless a node needs the number, which the logger
            ``qtrace`` names.
        batch: the axis of the batch, as ``input:axis`` such as ``"x:0"``. Inputs whose axis has the same name
            in the file share it. The word "auto" is the first axis of the first input if the file leaves it
            open. It is fixed like any other if a node needs the number. None fixes every axis.
        fixed: whether every axis but the batch is fixed at the size in ``shapes``.
        outputs: names of tensors in the file at which it is cut: they are the outputs, and what they do not
            need is left out, inputs, too. None keeps the outputs of the file.

    Returns:
        The module, prepared and calibrated if the file is quantized. It takes the file's inputs in their
        order, and returns one tensor or a tuple of them.

    Raises:
        ImportingError: when the file is missing, damaged or hostile, or an input lacks its shape. Also when
            there is no such output, or nodes lack an equal in MegEngine; the message names all of them.
    """
    file = Path(path)
    try:
        return read_onnx(file, shapes, batch=batch, fixed=fixed, outputs=outputs)
    except UnsupportedNodesError as error:
        raise UnsupportedNodesError(f"{file}: {error}", error.problems) from error.__cause__
    except (ImportingError, GraphError) as error:
        prefix = "" if str(error).startswith(str(file)) else f"{file}: "
        raise ImportingError(f"{prefix}{error}") from error.__cause__


def read_onnx(
    file: Path,
    shapes: Mapping[str, Sequence[int]] | None = None,
    *,
    batch: str | None = "auto",
    fixed: bool = False,
    outputs: Sequence[str] | None = None,
    source: str = "",
) -> TracedModule:
    """Reads a network as `from_onnx` does, in errors that need not name the file.

    Args:
        file: the file.
        shapes: see `from_onnx`.
        batch: see `from_onnx`.
        fixed: see `from_onnx`.
        outputs: see `from_onnx`.
        source: the name of the network of another framework that wrote the file; "" for a file by itself.

    Raises:
        ImportingError: see `from_onnx`.
        GraphError: when MegEngine refuses an op.
    """
    model, stored = load_model(file)
    opsets = {"" if o.domain == "ai.onnx" else o.domain: int(o.version) for o in model.opset_import}
    graph = read_graph(model.graph, opsets, stored)
    if outputs is not None:
        whole, graph = graph, cut(graph, outputs)
        gone = {value.name for value in whole.inputs} - {value.name for value in graph.inputs}
        shapes = {name: shape for name, shape in (shapes or {}).items() if name not in gone}
    if not graph.outputs:
        raise ImportingError("the graph of the file names no output, so that there is nothing to compute.")
    _tell_defaults(graph, model, source or str(file))
    strings = {t.name for t in model.graph.initializer if t.data_type == onnx.TensorProto.STRING}
    graph = without_strings(graph, strings)
    inputs = resolve_inputs(graph, shapes, batch, fixed)
    graph = with_float_weights(store_copies(name_by_scopes(graph)), opsets)
    graph = join_biases(join_channel_biases(with_pairs(graph, opsets)))
    paths = _parameter_paths(model)
    building = _Building(graph, opsets, file, paths, fix_axes(inputs, set(open_sizes(inputs))))
    compared = file if outputs is None else None
    opened = build_open(inputs, building.build, compared, batch_stays=batch != "auto")
    traced = _record(opened, source or str(file))
    keep_own(traced, model, of_module=bool(source))
    return traced


def open_inputs(path: str | os.PathLike[str]) -> dict[str, tuple[int | None, ...] | None]:
    """Lists the inputs of an ONNX file whose shapes the file leaves open.

    Returns:
        Name -> its sizes with None for each open one; None if the number of axes is open.

    Raises:
        ImportingError: when the file is missing, damaged or hostile.
    """
    shapes = declared_inputs(path)
    return {name: sizes for name, sizes in shapes.items() if sizes is None or None in sizes}


def declared_inputs(path: str | os.PathLike[str]) -> dict[str, tuple[int | None, ...] | None]:
    """Lists the inputs of an ONNX file, in its order; returns and raises what `open_inputs` does."""
    return {
        name: None if sizes is None else tuple(n if isinstance(n, int) else None for n in sizes)
        for name, sizes in declared_axes(path).items()
    }


def declared_axes(path: str | os.PathLike[str]) -> dict[str, tuple[int | str, ...] | None]:
    """Lists the inputs of an ONNX file, in its order.

    Returns:
        Name -> its sizes, with the name that the file has for each open one, "" without a name; None if the
        number of axes is open.

    Raises:
        ImportingError: when the file is missing, damaged or hostile.
    """
    file = Path(path)
    model = load_structure(file)
    opsets = {"" if o.domain == "ai.onnx" else o.domain: int(o.version) for o in model.opset_import}
    stored = {tensor.name: _EMPTY for tensor in model.graph.initializer}
    return {value.name: value.sizes for value in read_graph(model.graph, opsets, stored).inputs}


_EMPTY = np.zeros(0, np.float32)
_LAYERS = ("Conv", "ConvTranspose", "Gemm", "MatMul")


def _tell_defaults(graph: Graph, model: onnx.ModelProto, source: str) -> None:
    """Says which inputs have default values, as these are what the network computes with from now on.

    Some exporters list all that is stored as inputs, too: where weights are among these, none is told.
    """
    read, stored = count_readers(graph), {tensor.name for tensor in model.graph.initializer}
    names = [value.name for value in model.graph.input if value.name in stored and read[value.name]]
    weights = {node.inputs[1] for node in graph.nodes if node.op in _LAYERS}
    if not names or model.ir_version < onnx.IR_VERSION_2019_1_22 or not weights.isdisjoint(names):
        return
    shown = shorten_list(map(repr, names))
    have = f"input {shown} has a default value" if len(names) == 1 else f"inputs {shown} have default values"
    what = "it is an input" if len(names) == 1 else "they are inputs"
    _LOG.warning("%s: %s, which the network keeps: %s no longer", source, have, what)


def _record(opened: Opened, source: str) -> TracedModule:
    """Records which axes are open, and says which ones a node fixes."""
    record = open_axes_of(opened)
    if record.axes or record.fixed:
        write_open_axes(opened.traced, record)
    if record.fixed:
        _declare_fixed(opened.traced, record)
    for axis in record.fixed:
        _LOG.warning("%s: %s", source, axis)
    return opened.traced


def _declare_fixed(traced: TracedModule, record: OpenAxes) -> None:
    """Makes the sizes at which nodes fix axes those that the inputs declare."""
    interface = read_interface(traced)
    assert interface is not None
    inputs = []
    for node, info in zip(traced.graph.inputs[1:], interface.inputs, strict=True):
        sizes = list(info.sizes or ())
        for axis in record.fixed:
            if axis.input == node.name:
                sizes[axis.axis] = int(node.shape[axis.axis])
        inputs.append(replace(info, sizes=tuple(sizes)))
    write_interface(traced, replace(interface, inputs=tuple(inputs)))


@dataclass(frozen=True, eq=False)
class _Building:
    """Builds the graph of a file for the shapes and open axes of its inputs.

    Attributes:
        graph: the graph of the file.
        opsets: the versions of the domains that the model imports.
        file: the file.
        paths: name of stored integers -> path of their parameter.
        closed: the inputs with fixed axes.
    """

    graph: Graph
    opsets: Mapping[str, int]
    file: Path
    paths: Mapping[str, str]
    closed: Sequence[InputShape]

    @paused_collector()
    def build(self, inputs: Sequence[InputShape], unlike: frozenset[str] = frozenset()) -> TracedModule:
        """Returns the graph.

        An open axis is fixed rather than that a node is kept as in the file for it, unless the node resizes.

        Args:
            inputs: the inputs.
            unlike: see `Importer`.

        Raises:
            UnsupportedNodesError: when nodes can neither be written in MegEngine nor be kept.
        """
        keepable = (lambda: self._kept) if open_sizes(inputs) else None
        importer, results = self._walk(inputs, keepable, unlike)
        outputs = [_output(importer, n, v) for n, v in zip(self.graph.outputs, results, strict=True)]
        origin = list_names(importer, self.graph)
        traced = importer.builder.finish(tuple(outputs) if len(outputs) > 1 else outputs[0], copy_views=False)
        write_origin(traced, origin)
        importer.layers.frees.give_back()
        if importer.kept:
            RemoveDeadCode().change(traced)  # what was added before a node was refused
        compose(traced)
        drop_unread(traced, importer.layers.kept)
        insert_copies(traced, find_copies(traced))  # kernels take or refuse views by their batch
        write_interface(traced, _interface(self.graph, inputs, results))
        if importer.layers.roundings or importer.layers.parameters:
            return quantize_as_file(traced, importer.layers.parameters)
        return traced

    @functools.cached_property
    def _kept(self) -> Collection[str]:
        """The first outputs of the nodes that are kept if no axis is open."""
        try:
            return self._walk(self.closed, None)[0].kept
        except (ImportingError, GraphError):
            return ()

    def _walk(
        self,
        inputs: Sequence[InputShape],
        keepable: Callable[[], Collection[str]] | None,
        unlike: frozenset[str] = frozenset(),
    ) -> tuple[Importer, list[Value]]:
        builder = GraphBuilder(node_name(self.graph.name or self.file.stem))
        values, source = _add_inputs(builder, inputs)
        importer = Importer(builder, self.opsets, self.file, source, keepable, unlike)
        importer.layers.paths.update(self.paths)
        importer.layers.learnable = find_scales_and_shifts(self.graph)
        results = importer.run(self.graph, Scope(values))
        if importer.problems:
            _refuse(importer.problems)
        return importer, importer.outputs(self.graph, results)


def _add_inputs(
    builder: GraphBuilder, inputs: Sequence[InputShape]
) -> tuple[dict[str, Value], tuple[TensorNode, int] | None]:
    """Adds the inputs; returns their values, and the one whose axis is the batch if no other axis is open."""
    values: dict[str, Value] = {}
    source = None
    shapes = {item.name: item.shape for item in inputs}
    (others,) = other_sizes(shapes, axes_of(inputs), 1, distinct=False)
    for item in inputs:
        if len(item.open) > (item.batch_axis is not None):
            node = builder.input(item.name, item.shape, item.carried, other=others[item.name])
        else:
            node = builder.input(item.name, item.shape, item.carried, item.batch_axis)
        values[item.name] = Computed(node, item.dtype)
        if item.batch_axis is not None and source is None and not open_sizes(inputs):
            source = node, item.batch_axis
    return values, source


def _parameter_paths(model: onnx.ModelProto) -> dict[str, str]:
    """Returns name of stored integers -> path of their parameter, which files of qtrace have."""
    text = next((p.value for p in model.metadata_props if p.key == "qtrace.parameters"), "{}")
    try:
        return {name: path for name, path in parse_document(text).items() if isinstance(path, str)}
    except ValueError:
        return {}


def _output(importer: Importer, name: str, value: Value) -> object:
    if isinstance(value, Computed):
        return value.node
    if isinstance(value, Stored):
        return importer.layers.tensor(value)
    if isinstance(value, QuantizedIntegers):
        raise ImportingError(f"output {name!r} is integers: end the file with a DequantizeLinear.")
    if isinstance(value, Sizes):
        return importer.layers.sizes_tensor(value, name)
    raise ImportingError(f"output {name!r} is no tensor.")


def _interface(graph: Graph, inputs: Sequence[InputShape], results: Sequence[Value]) -> Interface:
    dtypes: list[np.dtype] = []
    for value, declared in zip(results, graph.output_dtypes, strict=True):
        computed = value.array.dtype if isinstance(value, Stored) else getattr(value, "dtype", None)
        if isinstance(value, Sizes):
            computed = value.arrays[0].dtype
        dtypes.append(declared or computed or np.dtype(np.float32))
    return Interface(
        tuple(TensorInfo(item.name, item.dtype.name, item.declared) for item in inputs),
        tuple(TensorInfo(name, dtype.name) for name, dtype in zip(graph.outputs, dtypes, strict=True)),
    )


def _refuse(problems: Sequence[str]) -> None:
    shown = shorten_list(problems, "; ", SHOWN_LINES)
    count = f"{len(problems)} nodes have" if len(problems) > 1 else "a node has"
    raise UnsupportedNodesError(f"{count} no equal in a traced graph: {shown}.", problems)

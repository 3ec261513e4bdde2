"""The network that is quantized: an ONNX file, a file of qtrace, a module, also of torch, or a trace.

It runs next to its graph, too: an import, a trace and the algorithms that prepare a graph say of themselves
that they change no value. The copies of a module share its parameters.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
from megengine.module import Module

from qtrace.data import Batch, DataSource
from qtrace.data.base import GIVE_BATCHES, batch_length
from qtrace.data.batches import as_arguments, can_run, evaluating, first_samples
from qtrace.errors import CalibrationError, DataError, GraphError
from qtrace.graph.differences import values
from qtrace.graph.files.serialize import load
from qtrace.graph.interface import list_inputs, read_interface
from qtrace.graph.kernels import quiet_engine, shared_copies
from qtrace.graph.native import lower
from qtrace.graph.opaque import cure_for_opaque, divides_by_inputs, opaque_calls
from qtrace.graph.tracing.recording import without_none
from qtrace.graph.tracing.trace import trace
from qtrace.graph.types import TracedModule
from qtrace.importing import is_torch_module
from qtrace.importing.onnx import declared_axes, from_onnx, open_inputs
from qtrace.importing.onnx.float_weights import read_unrounded
from qtrace.onnxfile.external_data import read_model
from qtrace.onnxfile.local_session import SessionSettings, dtype_of
from qtrace.onnxfile.model import read_ending
from qtrace.onnxfile.sessions import open_session
from qtrace.plugins import load_object
from qtrace.preparation.faithfulness import Original, Run, UnpreparedGraph, arrays_of, cut_call, takes_call
from qtrace.preparation.model import is_quantized
from qtrace.quantizing.file_runs import input_values


def open_original(source: Any, traced: TracedModule) -> Original | None:
    """Returns the network that was imported or traced; None where it does not run here.

    Args:
        source: the network, as for `read_network`.
        traced: its graph.
    """
    if isinstance(source, TracedModule):
        return UnpreparedGraph(source)
    if isinstance(source, Module):
        return _Module(source, traced)
    if is_torch_module(source):
        return _TorchModule(source)
    if isinstance(source, (str, os.PathLike)):
        if Path(source).suffix.lower() != ".onnx":
            return UnpreparedGraph(traced)
        path = Path(source)
        # A division by 0 in an integer would end the process in onnxruntime.
        return None if read_interface(traced) is None or divides_by_inputs(traced) else _File(path, traced)
    return None


class _Module(Original):
    keeps_state = True

    def __init__(self, module: Module, traced: TracedModule) -> None:
        self.name = type(module).__name__
        self._module, self._traced = lower(module)[0], traced

    def start(self) -> Run:
        module = copy.deepcopy(self._module, shared_copies(self._module))
        module.eval()

        def run(batch: Batch) -> list[np.ndarray]:
            args, kwargs = as_arguments(batch, self._traced)
            with evaluating(self._traced), quiet_engine(module):
                return arrays_of(values(without_none(module(*args, **kwargs))))

        return run


class _TorchModule(Original):
    keeps_state = True

    def __init__(self, module: Any) -> None:
        self.name = type(module).__name__
        self._module = module

    def start(self) -> Run:
        import torch

        # A module of TorchScript cannot share its parameters with a copy.
        script = isinstance(self._module, torch.jit.ScriptModule)
        parameters = {id(parameter): parameter for parameter in self._module.parameters()}
        module = self._module if script else copy.deepcopy(self._module, parameters)

        def run(batch: Batch) -> list[np.ndarray]:
            args, kwargs = example_inputs(self._module, batch)
            tensors = [torch.from_numpy(np.array(value)) for value in args]
            named = {name: torch.from_numpy(np.array(value)) for name, value in kwargs.items()}
            flags = [(part, part.training) for part in module.modules() if hasattr(part, "training")]
            try:
                for part, _ in flags:
                    part.training = False
                with torch.no_grad():
                    return list(_torch_arrays(module(*tensors, **named)))
            finally:
                for part, training in flags:
                    part.training = training

        return run


class _File(Original):
    """An ONNX file in onnxruntime, whose weights are in memory while a run of it is.

    Rounding by the range of each batch is left out, as the import leaves it out.
    """

    granularity = 2.0**-21  # of its sigmoid, which is computed as 0.5 and a difference

    def __init__(self, path: Path, traced: TracedModule) -> None:
        self.name, self._path, self._traced = str(path), path, traced
        if _computes_in_half(path):
            self.precision = 2.0**-10

    def start(self) -> Run:
        interface = read_interface(self._traced)
        assert interface is not None
        inputs = [info.name for info in interface.inputs]
        outputs = [info.name for info in interface.outputs]
        # Op by op: what onnxruntime fuses has other last bits.
        settings = SessionSettings(optimize=False, as_megengine=True)
        session = open_session(read_unrounded(self._path) or read_ending(self._path), settings, self.name)
        kinds = {info.name: dtype_of(info.type) for info in session.inputs}

        def run(batch: Batch) -> list[np.ndarray]:
            given = dict(zip(inputs, input_values(self._traced, batch, 0), strict=True))
            feeds = {n: v.astype(kinds[n] or v.dtype, copy=False) for n, v in given.items() if n in kinds}
            # A kept output of the session would keep all the memory of its run.
            return [value.copy() for value in session.run(outputs, feeds)]

        return run


def _computes_in_half(path: Path) -> bool:
    """Whether onnxruntime computes a file in 16 bits, at least in part."""
    import onnx

    half = {onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}
    graph = read_model(path).graph
    casts = (a.i for n in graph.node if n.op_type == "Cast" for a in n.attribute if a.name == "to")
    ends = (value.type.tensor_type.elem_type for value in (*graph.input, *graph.output))
    return not half.isdisjoint([*casts, *ends, *(tensor.data_type for tensor in graph.initializer)])


def _torch_arrays(result: Any) -> Iterator[np.ndarray]:
    """Yields the tensors of a result, in its order."""
    if hasattr(result, "detach"):
        yield result.detach().cpu().numpy()
    elif isinstance(result, Mapping):
        for value in result.values():
            yield from _torch_arrays(value)
    elif isinstance(result, (tuple, list)):
        for value in result:
            yield from _torch_arrays(value)


_LOG = logging.getLogger("qtrace")

Shapes = Mapping[str, Sequence[int]]


def read_network(
    source: Any, data: DataSource, shapes: Shapes | None, allow: Sequence[str], keeps_nodes: bool = True
) -> TracedModule:
    """Returns a network as a traced module.

    Args:
        source: the path of an .onnx or .mge file; a Module, which is traced on the first batch; a module of
            torch, which is exported on it; or a TracedModule.
        data: the calibration data.
        shapes: the shapes of inputs that an ONNX file leaves open; None for the shapes of the first batch.
        allow: the user's classes that a file may name.
        keeps_nodes: whether the file that is to be written has nodes as an ONNX file has them.

    Raises:
        GraphError: when ``source`` is none of these, a network that is quantized already, or one with nodes
            that such a file cannot have for their open axes.
    """
    if isinstance(source, (str, os.PathLike)):
        traced = _read_file(Path(source), data, shapes, allow, keeps_nodes)
    elif isinstance(source, TracedModule):
        traced = source
    elif isinstance(source, Module):
        args, keywords = example_inputs(source, next(iter(data)))
        traced = trace(source, *args, gradients=False, **keywords)
    elif is_torch_module(source):
        args, keywords = example_inputs(source, next(iter(data)))
        names = _parameters(source) if keywords else ()
        from_torch = load_object("qtrace.sources", "torch", FunctionType)
        traced = from_torch(
            source, {**dict(zip(names, args, strict=False)), **keywords} if keywords else args
        )
    else:
        raise GraphError(
            f"the network is of type {type(source).__name__}: give the path of an .onnx or .mge file, a "
            "Module of MegEngine or torch, or a TracedModule."
        )
    if is_quantized(traced):
        raise GraphError(
            "the network is quantized already: give the float network, or use qtrace.calibrate, convert and "
            "export for a prepared one."
        )
    if not keeps_nodes:
        _refuse_opaque(traced)
    return traced


def _refuse_opaque(traced: TracedModule) -> None:
    """Refuses nodes that a file of another format would have if the axes were fixed, before any work.

    Raises:
        GraphError: naming the first one.
    """
    for expr in opaque_calls(traced):
        if cure := cure_for_opaque(expr):
            raise GraphError(f"{expr.outputs[0].name} has a form only in ONNX files: {cure}.")


def own_file(source: Any) -> Path | None:
    """Returns the ONNX file that a network comes from; None if it comes from elsewhere."""
    own = isinstance(source, (str, os.PathLike)) and Path(source).suffix.lower() == ".onnx"
    return Path(source) if own else None


def takes_batch(traced: TracedModule, batch: Batch) -> bool:
    """Returns whether a network takes a batch.

    Some exporters write the batch into the network, as the first size of a Reshape. A network whose file
    fixes the batch may take the first sample of it, as detectors do before a suppression: it runs on more and
    does not look at them.

    Args:
        traced: the network.
        batch: a batch of the data.
    """
    count, declared = batch_length(batch), _declared_batch(traced)
    try:
        arguments = as_arguments(batch, traced)
    except CalibrationError:  # said where the batch is read
        return False
    if declared == count or (declared is None and _is_traced_on(traced, batch)):
        return True
    if declared is None:
        return takes_call(arguments, traced) or can_run(traced, arguments)
    return can_run(traced, arguments, samples=count)


def takes_single(traced: TracedModule, batch: Batch) -> bool:
    """Returns whether a network takes the first sample of a batch that it takes; so if there is one."""
    arguments = as_arguments(batch, traced)
    few = first_samples(arguments, 1)
    if few is None:
        return True
    if _declared_batch(traced) == batch_length(batch):  # it may look at its first sample alone
        return can_run(traced, few, samples=1)
    return cut_call(arguments, 1, traced) is not None


def traced_batch(traced: TracedModule) -> int | None:
    """Returns the batch that the file of a network fixes, or else the traced one."""
    shapes = (shape for _, shape in list_inputs(traced))
    return _declared_batch(traced) or next((int(shape[0]) for shape in shapes if shape), None)


def _is_traced_on(traced: TracedModule, batch: Batch) -> bool:
    arrays = batch.values() if isinstance(batch, dict) else batch
    return sorted(array.shape for array in arrays) == sorted(shape for _, shape in list_inputs(traced))


def _declared_sizes(traced: TracedModule) -> dict[str, tuple[int | None, ...] | None]:
    """Returns input -> its sizes in the ONNX file, None for an open one; {} for a network of no such file."""
    interface = read_interface(traced)
    return {} if interface is None else {info.name: info.sizes for info in interface.inputs}


def _declared_batch(traced: TracedModule) -> int | None:
    """Returns the batch that an ONNX file fixes; None if it leaves it open, or its inputs differ."""
    fixed = {sizes[0] for sizes in _declared_sizes(traced).values() if sizes}
    return fixed.pop() if len(fixed) == 1 else None


def _read_file(
    path: Path, data: DataSource, shapes: Shapes | None, allow: Sequence[str], keeps_nodes: bool
) -> TracedModule:
    if path.suffix.lower() == ".onnx":
        known = dict(shapes or {})
        if any(name not in known for name in open_inputs(path)):
            known = {**open_shapes(path, next(iter(data))), **known}
        traced = from_onnx(path, known or None)
        return traced if keeps_nodes else _without_opaque(traced, path, known)
    if path.suffix.lower() == ".mge":
        return load(path, allow=allow)
    raise GraphError(f"{path} is no network: give an .onnx file, or an .mge file that qtrace.save wrote.")


def _without_opaque(traced: TracedModule, path: Path, shapes: Shapes) -> TracedModule:
    """Reads a file with fixed axes if some of its nodes are kept only because axes are open."""
    kept = opaque_calls(traced)
    if not kept:
        return traced
    closed = from_onnx(path, shapes or None, fixed=True)
    if len(opaque_calls(closed)) >= len(kept):
        return traced
    _LOG.warning(
        "%s: all axes but the batch are fixed at the size of the data, as nodes such as %s have forms for "
        "open sizes only in ONNX files",
        path,
        kept[0].outputs[0].name,
    )
    return closed


def open_shapes(path: str | os.PathLike[str], batch: Batch) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the inputs that an ONNX file leaves open, of one sample of a batch.

    One sample has size 1 on the first axis of each input. An input whose first axis is another one may count
    the samples further behind, as a recurrent state does: where the file names an axis like the batch, and
    the data have as many. What is named elsewhere, too, but not as the first axis of an input before, is no
    batch, such as the edges of a graph, and has the size of the data. Nor is any first axis where an input of
    places lacks an axis of the samples, as the pairs of nodes in a graph. Some exporters name all axes alike.

    Raises:
        DataError: when the batch lacks such an input.
    """
    declared = declared_axes(path)
    opened = [(i, key, s[0]) for i, (key, s) in enumerate(declared.items()) if s and isinstance(s[0], str)]
    first = next((size for *_, size in opened if size), None)
    counted = next((_array(batch, i, key) for i, key, size in opened if size == first), None)
    count = 0 if counted is None else len(counted)
    pairs = any(_holds_places(_array(batch, i, k), s, first) for i, (k, s) in enumerate(declared.items()))
    inner = {size for sizes in declared.values() for size in (sizes or ())[1:]} - {first, ""}
    shapes: dict[str, tuple[int, ...]] = {}
    for index, (key, sizes) in enumerate(declared.items()):
        if sizes is not None and not any(isinstance(size, str) for size in sizes):
            continue
        array = _array(batch, index, key)
        if array is None:
            names = [*batch] if isinstance(batch, dict) else [f"{len(batch)} without names"]
            shown = ", ".join([*names[:5], "..."] if len(names) > 5 else names)
            raise DataError(
                f"the data lack input {key!r} of {path} and have only the arrays {shown}: name one of "
                f"them so, or {GIVE_BATCHES}."
            )
        if sizes is not None and len(sizes) != array.ndim:
            raise DataError(
                f"a batch gives {key!r} of shape {array.shape}, but {path} declares the axes "
                f"({', '.join(str(size) or '?' for size in sizes)}): give batches with all of them, such as "
                "numpy.stack of samples."
            )
        if sizes is None:
            sizes = ("",) * array.ndim
        if not sizes:  # a setting
            shapes[key] = ()
            continue
        counts = not isinstance(sizes[0], int) and sizes[0] not in inner and not pairs
        one = {0} if counts else set[int]()
        if first is not None and sizes[0] != first:
            one |= {a for a, size in enumerate(sizes) if a and size == first and array.shape[a] == count}
        shapes[key] = tuple(
            size if isinstance(size, int) else 1 if axis in one else n
            for axis, (size, n) in enumerate(zip(sizes, array.shape, strict=True))
        )
    return shapes


def _holds_places(array: np.ndarray | None, sizes: Sequence[int | str] | None, samples: str | None) -> bool:
    """Whether an input of integers has several axes, the first one a number and none of the samples."""
    if array is None or array.dtype.kind not in "iu" or not sizes or len(sizes) < 2 or not samples:
        return False
    return isinstance(sizes[0], int) and sizes[0] > 1 and samples not in sizes


def _array(batch: Batch, index: int, key: str) -> np.ndarray | None:
    """Returns the array of an input in a batch; None if there is none."""
    if isinstance(batch, dict):
        return batch.get(key)
    return batch[index] if index < len(batch) else None


def example_inputs(module: Any, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns a batch as inputs of ``module``: by position up to one that is left out, then by name."""
    if isinstance(batch, tuple):
        return batch, {}
    names = _parameters(module)
    if not set(batch) <= set(names):
        raise DataError(
            f"the data have the inputs {', '.join(batch)}, but {type(module).__name__}.forward takes "
            f"{', '.join(names)}: name the arrays after its parameters."
        )
    first = list(itertools.takewhile(batch.__contains__, names))
    rest = [name for name in names if name in batch and name not in first]
    return tuple(batch[name] for name in first), {name: batch[name] for name in rest}


def _parameters(module: Any) -> list[str]:
    return list(inspect.signature(module.forward).parameters)

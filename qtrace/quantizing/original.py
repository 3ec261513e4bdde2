"""The network as the user gave it, which runs beside its graph.

An import, a trace and the algorithms that prepare a graph say of themselves that they change no value. Here
the module or file itself runs on samples of the data. The copies of a module share its parameters.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from megengine.module import Module

from qtrace.data import Batch
from qtrace.data.batches import as_arguments, evaluating
from qtrace.graph.interface import read_interface
from qtrace.graph.kernels import quiet_engine
from qtrace.graph.native import lower
from qtrace.graph.opaque import divides_by_inputs
from qtrace.graph.tensors import shared_copies
from qtrace.graph.tracing.diff import values
from qtrace.graph.tracing.recording import without_none
from qtrace.graph.types import TracedModule
from qtrace.importing.foreign import is_torch_module
from qtrace.importing.onnx.quantization.float_weights import read_unrounded
from qtrace.onnxfile.local_session import SessionSettings, dtype_of
from qtrace.onnxfile.reading import read_model
from qtrace.onnxfile.sessions import open_session
from qtrace.preparation.original import GivenGraph, Original, Run, arrays_of
from qtrace.quantizing.file_runs import input_values
from qtrace.quantizing.sources import example_inputs

__all__ = ["open_original"]


def open_original(source: Any, traced: TracedModule) -> Original | None:
    """Returns the network that was imported or traced; None where it does not run here.

    Args:
        source: the network, as for `read_network`.
        traced: its graph.
    """
    if isinstance(source, TracedModule):
        return GivenGraph(source)
    if isinstance(source, Module):
        return _Module(source, traced)
    if is_torch_module(source):
        return _TorchModule(source)
    if isinstance(source, (str, os.PathLike)):
        if Path(source).suffix.lower() != ".onnx":
            return GivenGraph(traced)
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
        session = open_session(read_unrounded(self._path) or self._path, settings, self.name)
        kinds = {info.name: dtype_of(info.type) for info in session.inputs}

        def run(batch: Batch) -> list[np.ndarray]:
            given = dict(zip(inputs, input_values(self._traced, batch, 0), strict=True))
            feeds = {n: v.astype(kinds[n] or v.dtype, copy=False) for n, v in given.items() if n in kinds}
            return session.run(outputs, feeds)

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

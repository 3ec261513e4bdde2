"""What a batch holds beside the inputs of a network: labels, which are left out."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from megengine import Tensor
from megengine.module import Module

from qtrace.data import Batch
from qtrace.data.opening import find_labels, names_labels
from qtrace.graph.interface import read_inputs
from qtrace.graph.signature import argument_names
from qtrace.graph.types import TracedModule
from qtrace.importing.onnx import declared_inputs
from qtrace.importing.torch import is_torch_module

__all__ = ["labels_of"]

_SAMPLES = 2
Values = Mapping[str, np.ndarray]


def labels_of(source: Any, batch: Batch) -> tuple[int | str, ...]:
    """Returns what a batch holds beside the inputs of a network and looks like labels.

    An argument of a module that may be left out, such as a mask, is an input if the batch has it by name. One
    that adds a result, as labels add a loss, is none. One whose name is one of labels is an input only if the
    results depend on it. The module runs on two samples to tell.

    Args:
        source: the network, as for `read_network`; of an .mge file the inputs are not known yet.
        batch: the first batch.

    Raises:
        ImportingError: when an ONNX file is missing, damaged or hostile.
    """
    if isinstance(source, (str, os.PathLike)) and Path(source).suffix.lower() == ".onnx":
        return find_labels(batch, list(declared_inputs(source)))
    if isinstance(source, TracedModule):
        declared = list(read_inputs(source))
        names = argument_names(source)
        return find_labels(batch, declared or names) or find_labels(batch, names)
    if isinstance(source, Module) or is_torch_module(source):
        inputs = _find_inputs(source, batch)
        return find_labels(batch, inputs) if inputs else ()
    return ()


def _find_inputs(module: Any, batch: Batch) -> list[str]:
    """Returns the arguments of forward that are inputs; none if it can be called without any."""
    parameters = inspect.signature(module.forward).parameters
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [n for n, p in parameters.items() if p.kind in positional and p.default is p.empty]
    given = [n for n in parameters if isinstance(batch, dict) and n in batch and n not in required]
    if not given:
        return required
    by_name = [*required, *(name for name in given if not names_labels(name))]
    assert isinstance(batch, dict)
    if any(name not in batch for name in required):
        return by_name
    return _find_by_results(_Runner(module), batch, required, given) or by_name


def _find_by_results(run: _Runner, batch: Values, required: Sequence[str], given: Sequence[str]) -> list[str]:
    """Returns the inputs by what the module gives with each argument and without; none if it does not run."""
    inputs = [*required, *(name for name in given if not names_labels(name))]
    known = run(batch, inputs)
    if known is None:
        return []
    for name in given:
        with_it, without = (*inputs, name), [n for n in inputs if n != name]
        if name in inputs:
            fewer = run(batch, without)
            if fewer is not None and (
                _shapes(fewer) != _shapes(known) or _is_idle(batch[name], fewer, known)
            ):
                inputs, known = without, fewer
        else:
            more = run(batch, with_it)
            if more is not None and _shapes(more) == _shapes(known) and not _are_equal(more, known):
                inputs, known = list(with_it), more
    return inputs


def _is_idle(value: np.ndarray, without: Sequence[np.ndarray], with_it: Sequence[np.ndarray]) -> bool:
    """Whether a number for each sample changes no result, as a class does where no loss is computed."""
    return value.ndim == 1 and value.dtype.kind in "iub" and _are_equal(without, with_it)


def _shapes(results: Sequence[np.ndarray]) -> list[tuple[int, ...]]:
    return [value.shape for value in results]


def _are_equal(results: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> bool:
    return all(
        np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in zip(results, others, strict=True)
    )


class _Runner:
    """Runs a copy of a module, in eval mode, on the first samples of a batch.

    Args:
        module: a module of MegEngine or torch; it is not changed.
    """

    def __init__(self, module: Any) -> None:
        self.of_torch = not isinstance(module, Module)
        self.module = copy.deepcopy(module)
        self.module.eval()

    def __call__(self, batch: Values, names: Sequence[str]) -> list[np.ndarray] | None:
        """Returns the tensors that the module gives for some of its arguments; None if it fails."""
        arguments = {name: _first(batch[name]) for name in names}
        try:
            if not self.of_torch:
                return _tensors(self.module(**{n: Tensor(v) for n, v in arguments.items()}))
            import torch

            with torch.no_grad():
                return _tensors(self.module(**{n: torch.from_numpy(v) for n, v in arguments.items()}))
        except Exception:  # the user's code, which says why where it is traced
            return None


def _first(value: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(value[:_SAMPLES]) if np.ndim(value) else np.asarray(value)


def _tensors(result: Any) -> list[np.ndarray]:
    """Returns the tensors in a result as arrays; other values are left out."""
    if hasattr(result, "numpy"):
        return [np.asarray(result.numpy())]
    if isinstance(result, Mapping):
        result = result.values()
    elif not isinstance(result, (list, tuple)):
        return []
    return [array for value in result for array in _tensors(value)]

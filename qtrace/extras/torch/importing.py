"""Brings a network of torch into a traced graph under the names of its own state."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qtrace.errors import GraphError, ImportingError
from qtrace.extras.torch.exporting import Example, Network, export, open_network, read_example
from qtrace.extras.torch.state import note_state
from qtrace.graph.types import TracedModule
from qtrace.importing.onnx import open_inputs, read_onnx
from qtrace.importing.onnx.opening import UnsupportedNodesError
from qtrace.plugins.options import check_arguments
from qtrace.process import on_engine_thread

__all__ = ["from_torch"]

_LOG = logging.getLogger("qtrace")
_BATCH = "N"


@check_arguments
@on_engine_thread
def from_torch(
    source: Any, example: Any = None, *, dynamic: Mapping[str, Mapping[int, str]] | None = None
) -> TracedModule:
    """Reads a network of torch, as a flat traced module in eval mode.

    torch's own exporter writes it as ONNX, and `from_onnx` reads that. Layers and parameters have the paths
    of the module's ``state_dict``, ops the path of the module that calls them. The module stays as it is.

    Args:
        source: a `torch.nn.Module`, scripted or traced too, a program of `torch.export`, the path of a
            ``.pt2`` file that `torch.export.save` wrote, or of one that `torch.jit.save` wrote. torch loads
            such files: only load what you trust.
        example: the inputs of ``forward``: a tensor or array, a tuple of them, or a dict by name. A program
            needs none.
        dynamic: axes of inputs that stay open, such as ``{"x": {0: "N", 2: "H", 3: "W"}}``: input -> axis ->
            name of its size. None leaves the first axis of all inputs open, the batch, if torch can export
            the network so. Where it cannot, the logger ``qtrace`` says why. ``{}`` fixes all axes. A program
            has its own.

    Returns:
        The module. It takes the tensors of the example in their order, and returns one tensor or a tuple.

    Raises:
        ImportingError: when torch is missing or cannot export the network, or when ops lack an equal in
            MegEngine; the message names the line of the source where the exporter knows it.
    """
    network = open_network(os.fspath(source) if isinstance(source, os.PathLike) else source)
    inputs = read_example(network, example)
    axes = _open_axes(network, inputs, dynamic)
    with tempfile.TemporaryDirectory(prefix="qtrace-torch-") as folder:
        file = Path(folder) / "network.onnx"
        try:
            export(network, _widened(inputs, axes), axes.named, file)
        except ImportingError as error:
            if dynamic is not None or not axes.named:
                raise
            _LOG.warning("%s: the batch is fixed, since %s", network.name, str(error).rstrip("."))
            axes = _Axes({}, axes.shapes)
            export(network, inputs, {}, file)
        try:
            shapes = {name: axes.shapes[name] for name in open_inputs(file) if name in axes.shapes}
            traced = read_onnx(file, shapes or None, source=network.name)
        except UnsupportedNodesError as error:
            raise UnsupportedNodesError(f"{network.name}: {error}", error.problems) from error.__cause__
        except (ImportingError, GraphError) as error:
            raise ImportingError(f"{network.name}: {error}") from error.__cause__
    note_state(traced, network.state)
    return traced


@dataclass(frozen=True)
class _Axes:
    """The axes that stay open.

    Attributes:
        named: name of an input -> axis -> name of its size; one entry for each input if any is open.
        shapes: the shapes of the inputs by name.
    """

    named: Mapping[str, Mapping[int, str]]
    shapes: Mapping[str, tuple[int, ...]]


def _open_axes(network: Network, inputs: Example, dynamic: Mapping[str, Mapping[int, str]] | None) -> _Axes:
    """Returns the axes that stay open.

    Raises:
        ImportingError: when ``dynamic`` names an input or an axis that there is not.
    """
    tensors = _named(network, inputs)
    shapes = {name: tuple(int(n) for n in value.shape) for name, value in tensors.items()}
    if network.is_program:
        if dynamic is not None:
            raise ImportingError(
                "dynamic: a program of torch.export has its own open axes: export it with these."
            )
        return _Axes({}, shapes)
    if dynamic is None:
        batches = {shape[0] for shape in shapes.values() if shape}
        named = {name: {0: _BATCH} if shape else {} for name, shape in shapes.items()}
        return _Axes(named if len(batches) == 1 else {}, shapes)
    named = {name: dict[int, str]() for name in shapes}
    for name, own in dynamic.items():
        if name not in shapes:
            raise ImportingError(f"dynamic: {name!r} is no input; the inputs are {', '.join(shapes)}.")
        rank = len(shapes[name])
        for axis, text in own.items():
            if not isinstance(axis, int) or not -rank <= axis < rank:
                raise ImportingError(f"dynamic: {name} has the shape {shapes[name]}, and no axis {axis!r}.")
            if not isinstance(text, str) or not text.isidentifier():
                raise ImportingError(
                    f"dynamic: axis {axis} of {name} needs a name such as 'H', not {text!r}."
                )
            named[name][axis % rank] = text
    return _Axes(named if any(named.values()) else {}, shapes)


def _named(network: Network, inputs: Example) -> dict[str, Any]:
    """Returns the tensors of an example by the name of the parameter of ``forward``.

    Raises:
        ImportingError: when the example does not fit ``forward``.
    """
    if network.is_program:
        names = network.program.graph_signature.user_inputs
        return dict(zip(names, (*inputs.args, *inputs.kwargs.values()), strict=False))
    try:
        bound = network.signature.bind(*inputs.args, **inputs.kwargs)
    except TypeError as error:
        raise ImportingError(f"the example does not fit {network.name}.forward: {error}.") from None
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        if not hasattr(value, "shape"):
            raise ImportingError(
                f"input {name!r} of {network.name}.forward is a {type(value).__name__}: give tensors or "
                "arrays, and set other arguments in a module around it."
            )
        named[name] = value
    return named


def _widened(inputs: Example, axes: _Axes) -> Example:
    """Returns an example in which no open axis has the size 1, which torch's exporter takes for fixed."""
    by_position = list(axes.named)

    def widen(value: Any, name: str) -> Any:
        for axis in axes.named.get(name, {}):
            if value.shape[axis] == 1:
                value = value.repeat_interleave(2, axis)
        return value

    if not axes.named:
        return inputs
    return Example(
        tuple(widen(value, name) for value, name in zip(inputs.args, by_position, strict=False)),
        {name: widen(value, name) for name, value in inputs.kwargs.items()},
    )

"""Brings a network of torch into a traced graph under the names of its own state.

torch's own exporter writes ONNX. What it refuses is said in a sentence, with the line of the source.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import logging
import os
import re
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qtrace.errors import GraphError, ImportingError
from qtrace.extras.torch.state import import_torch, note_state
from qtrace.graph.types import TracedModule
from qtrace.importing.onnx import open_inputs, read_onnx
from qtrace.importing.onnx.opening import UnsupportedNodesError
from qtrace.plugins.options import check_arguments
from qtrace.process import on_engine_thread

Dynamic = Mapping[str, Mapping[int, str]]

_EXTERNAL = 2**30  # bytes of weights above which they lie next to the file: protobuf holds 2 GB
_SCRIPT_OPSET = 17  # the newest that all of the older exporter's ops are written for
# What to do with networks that select by values, such as torchvision's detectors.
_OLDER = (
    "give torch.jit.trace(module, example) in its place, which torch's older exporter writes with the "
    "branches of the example"
)
# What torch's exporter says of an op that it lacks.
_NO_FUNCTION = re.compile(r"No ONNX function found for <OpOverload\(op='([\w.]+)'")
# A place in the text of torch's errors: "(net.py:12 in forward)", 'File "net.py", line 12, in forward'.
_PLACE = re.compile(r'\(([^()\s]+\.py):(\d+) in \w+\)|File "([^"\n]+\.py)", line (\d+), in \w+')


@dataclass(frozen=True)
class Network:
    """What torch's exporter takes.

    Attributes:
        program: a module, a program of `torch.export`, or a module of TorchScript.
        name: the name of its class.
        is_program: whether it is a program of `torch.export`, which has its inputs and open axes already.
        is_script: whether it is TorchScript, which only torch's older exporter takes.
    """

    program: Any
    name: str
    is_program: bool = False
    is_script: bool = False

    @property
    def state(self) -> Mapping[str, Any]:
        """The tensors of its ``state_dict`` by name."""
        state = self.program.state_dict
        return state if self.is_program else state()

    @property
    def signature(self) -> inspect.Signature:
        """The parameters of ``forward`` of a module."""
        if not self.is_script:
            return inspect.signature(self.program.forward)
        own = self.program.forward.schema.arguments[1:]
        empty = inspect.Parameter.empty
        return inspect.Signature(
            [
                inspect.Parameter(
                    each.name,
                    inspect.Parameter.POSITIONAL_OR_KEYWORD,
                    default=each.default_value if each.has_default_value() else empty,
                )
                for each in own
            ]
        )


@dataclass(frozen=True)
class Example:
    """The inputs of a network.

    Attributes:
        args: inputs by position.
        kwargs: inputs by name.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def open_network(source: Any) -> Network:
    """Returns what torch's exporter takes: a module, a program, or what a file of either holds.

    Args:
        source: a `torch.nn.Module`, scripted or traced too, a `torch.export.ExportedProgram`, or the path of
            a ``.pt2`` file of `torch.export.save` or of a file of `torch.jit.save`.

    Raises:
        ImportingError: when it is anything else.
    """
    torch = import_torch()
    if isinstance(source, (str, Path)):
        return _open_file(Path(source), torch)
    if isinstance(source, torch.jit.ScriptModule):
        return Network(source, source.original_name, is_script=True)
    if isinstance(source, torch.jit.ScriptFunction):
        raise ImportingError(
            f"{source.name} is a function of TorchScript: give a torch.nn.Module whose forward calls it."
        )
    if isinstance(source, torch.nn.Module):
        return Network(source, type(source).__name__)
    if isinstance(source, torch.export.ExportedProgram):
        return Network(source, "ExportedProgram", is_program=True)
    raise ImportingError(
        f"the network is of type {type(source).__name__}: give a torch.nn.Module, a program of torch.export, "
        "or a file of torch.export.save or torch.jit.save."
    )


def _open_file(path: Path, torch: Any) -> Network:
    if not path.is_file():
        raise ImportingError(
            f"{path} is not a file: name one that torch.export.save (.pt2) or torch.jit.save (.pt) wrote."
        )
    if path.suffix.lower() == ".pt2":
        try:
            return Network(torch.export.load(path), path.name, is_program=True)
        except Exception as error:  # torch raises errors of many classes for damaged files
            raise ImportingError(f"{path} cannot be loaded by torch.export: {_line(error)}.") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            script = torch.jit.load(str(path), map_location="cpu")
    except Exception as error:  # as above
        raise ImportingError(
            f"{path} is neither a program of torch.export (.pt2) nor TorchScript ({_line(error)}): load "
            "other files of torch yourself, and give the module."
        ) from error
    return Network(script, path.name, is_script=True)


def read_example(network: Network, example: Any) -> Example:
    """Returns the inputs of a network as tensors.

    Args:
        network: the network.
        example: a tensor or array, a tuple of them by position, or a dict by name; None for a program, which
            has its own.

    Raises:
        ImportingError: when a module lacks its example, or an input is no tensor of numbers.
    """
    torch = import_torch()
    if network.is_program:
        args, kwargs = network.program.example_inputs or ((), {})
        return Example(tuple(args), dict(kwargs))
    if example is None:
        raise ImportingError(
            f"{network.name} needs an example of its inputs: from_torch(module, torch.zeros(1, 3, 224, 224))."
        )

    def tensor(value: Any) -> Any:
        if isinstance(value, torch.Tensor) or not hasattr(value, "__array__"):
            return value
        return torch.from_numpy(value.__array__().copy())

    if isinstance(example, Mapping):
        return Example((), {name: tensor(value) for name, value in example.items()})
    if isinstance(example, (tuple, list)):
        return Example(tuple(tensor(value) for value in example), {})
    return Example((tensor(example),), {})


def export(
    network: Network, example: Example, dynamic: Mapping[str, Mapping[int, str]] | None, path: Path
) -> None:
    """Writes a network to an ONNX file, in eval mode; the module stays as it is.

    Args:
        network: the network.
        example: its inputs.
        dynamic: name of each input -> axis -> name of its size, for axes that stay open; None for none.
        path: the file.

    Raises:
        ImportingError: when torch refuses the network.
    """
    torch = import_torch()
    with _eval_mode(network), _quiet(), torch.no_grad():
        try:
            if network.is_script:
                _export_script(network, example, dynamic or {}, path, torch)
            else:
                _export_program(network, example, dynamic, path, torch)
        except Exception as error:  # torch raises errors of many classes for networks that it cannot export
            raise ImportingError(_describe(network, error)) from error


def _export_program(
    network: Network, example: Example, dynamic: Dynamic | None, path: Path, torch: Any
) -> None:
    program = torch.onnx.export(
        network.program,
        example.args,
        kwargs=dict(example.kwargs) or None,
        dynamo=True,
        optimize=False,  # its rewrites rename weights; qtrace folds constants itself
        verbose=False,
        dynamic_shapes={name: dict(axes) for name, axes in dynamic.items()} if dynamic else None,
    )
    external = _stored_bytes(network) > _EXTERNAL
    program.save(str(path), external_data=external, keep_initializers_as_inputs=False)


def _export_script(network: Network, example: Example, dynamic: Dynamic, path: Path, torch: Any) -> None:
    """Writes a module of TorchScript by torch's older exporter, the only one that takes it."""
    bound = network.signature.bind(*example.args, **example.kwargs).arguments
    if any(dynamic.values()):
        # A trace may hold sizes of its example as numbers: then it fails here, where the error is torch's.
        network.program(*(_with_one_more(value, dynamic.get(name, {})) for name, value in bound.items()))
    torch.onnx.export(
        network.program,
        tuple(bound.values()),
        str(path),
        dynamo=False,
        opset_version=_SCRIPT_OPSET,
        input_names=list(bound),
        dynamic_axes={name: dict(axes) for name, axes in dynamic.items() if axes},
        do_constant_folding=False,  # it renames weights
        training=torch.onnx.TrainingMode.PRESERVE,  # EVAL folds BatchNorms; the modules are in eval mode
    )


def _with_one_more(value: Any, axes: Mapping[int, str]) -> Any:
    """Returns a tensor with one more entry, a copy of its first, along each of some axes."""
    for axis in axes:
        value = value.index_select(axis, value.new_tensor([*range(value.shape[axis]), 0]).long())
    return value


def _stored_bytes(network: Network) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in network.state.values())


@contextlib.contextmanager
def _eval_mode(network: Network) -> Iterator[None]:
    """Puts all modules into eval mode, and back."""
    modules = [] if network.is_program else list(network.program.modules())
    modules = [module for module in modules if hasattr(module, "training")]  # a frozen script lacks a mode
    flags = [module.training for module in modules]
    try:
        for module in modules:
            module.training = False
        yield
    finally:
        for module, flag in zip(modules, flags, strict=True):
            module.training = flag


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps what torch logs and prints of the export away: what it says of a failure is in the error."""
    loggers = [logging.getLogger(name) for name in ("torch", "torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    sink = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
        warnings.simplefilter("ignore")
        try:
            for logger in loggers:
                logger.setLevel(logging.CRITICAL)
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _describe(network: Network, error: BaseException) -> str:
    """Returns why torch cannot export a network, and the line of the source if the errors name one."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    place = next((text for find in (_place, _node_place) for text in map(find, reversed(causes)) if text), "")
    where = f" (at {place})" if place else ""
    if missing := next((m for c in causes if (m := _NO_FUNCTION.search(str(c)))), None):
        return (
            f"torch cannot export {network.name}{where}: its exporter lacks an ONNX form of {missing[1]}. "
            "Compute it by other ops, or export the part of the network before it."
        )
    older = "" if network.is_program or network.is_script else f", or {_OLDER}"
    return (
        f"torch cannot export {network.name}{where}: {_line(causes[-1])}. What depends on values of the data "
        f"belongs behind the network: export the part before it, or write it without a branch{older}."
    )


def _place(error: BaseException) -> str:
    """Returns ``FILE:LINE`` of the last frame outside of torch that an error names or passed."""
    named = [(a or c, b or d) for a, b, c, d in _PLACE.findall(str(error))]
    passed = [(frame.filename, str(frame.lineno)) for frame in traceback.extract_tb(error.__traceback__)]
    for frames in (named, passed):
        own = [frame for frame in frames if _is_own(frame[0])]
        if own:
            return ":".join(own[-1])
    return ""


def _node_place(error: BaseException) -> str:
    """Returns ``FILE:LINE`` of the node of torch's program at which its exporter failed."""
    trace = error.__traceback__
    while trace is not None:
        stack = getattr(trace.tb_frame.f_locals.get("node"), "stack_trace", None)
        named = [(a or c, b or d) for a, b, c, d in _PLACE.findall(stack or "")]
        if own := [frame for frame in named if _is_own(frame[0])]:
            return ":".join(own[-1])
        trace = trace.tb_next
    return ""


def _is_own(file: str) -> bool:
    """Returns whether a file is neither of torch, of its exporter's packages, nor one that runs them."""
    path = Path(file)
    if not path.is_absolute():  # torch shortens the names of its own files
        return False
    specs = (importlib.util.find_spec(package) for package in ("torch", "onnxscript", "onnx_ir"))
    folders = [Path(spec.origin).parent for spec in specs if spec is not None and spec.origin is not None]
    inner = [*folders, Path(__file__).parent, Path(contextlib.__file__)]
    return not any(path.is_relative_to(place) for place in inner)


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].rstrip('.')[:300]}" if lines else type(error).__name__


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
        source: a `torch.nn.Module`, scripted or traced too; a program of `torch.export`; or the path of a
            file of `torch.export.save` (``.pt2``) or `torch.jit.save`. PyTorch loads such files: only load
            what you trust.
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
            MegEngine. The message names the line of the source if the exporter knows it.
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

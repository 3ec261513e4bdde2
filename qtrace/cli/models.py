"""Loading of the models and data that the command line names."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qtrace.cli.console import Console
from qtrace.cli.images import change_config, own_flags, warn_unused
from qtrace.cli.naming import MODEL_FILES, check_factory, check_model
from qtrace.errors import DataError, QtraceError, Terminated, TraceError
from qtrace.process import engine

if TYPE_CHECKING:
    from qtrace.data import Batch, DataSource  # at run time it loads numpy, which --help does without

__all__ = [
    "build_module",
    "check_size",
    "check_stage",
    "is_factory",
    "is_onnx",
    "load_float",
    "load_model",
    "load_recipe",
    "model_file",
    "needs_example",
    "open_source",
    "preprocessing",
    "trace_factory",
]

_NOTED = "qtrace.pixels_noted"  # in the context of a command

Shapes = tuple[tuple[int, ...], ...]


def is_factory(model: str) -> bool:
    """Whether MODEL is ``pkg.mod:factory`` rather than a file."""
    from qtrace.data import is_object_name

    return is_object_name(model) and not Path(model).exists()


def needs_example(model: str) -> bool:
    """Whether MODEL becomes a graph with the help of the data: a factory, or an ONNX file with open sizes."""
    if is_onnx(model):
        from qtrace.importing.onnx import open_inputs

        return bool(open_inputs(model))
    return is_factory(model)


def is_onnx(model: str) -> bool:
    """Whether MODEL is the name of an ONNX file."""
    return Path(model).suffix.lower() == ".onnx"


def model_file(model: str, file: str) -> str:
    """Returns the file of a model: ``file`` of a folder that `qtrace calibrate` wrote, or ``model`` itself.

    Args:
        model: a file, or such a folder.
        file: which of the folder's models the command takes, of `MODEL_FILES`.

    Raises:
        UsageError: when the folder lacks such a file.
    """
    if not Path(model).is_dir():
        return model
    path = Path(model) / file
    if not path.exists():
        raise click.UsageError(
            f"{model} is a folder without {file}: give a file, or a folder that `qtrace calibrate` has "
            "written."
        )
    return str(path)


def _check_no_folder(model: str) -> None:
    """Refuses a folder where a command takes the float model."""
    if not Path(model).is_dir():
        return
    names = [name for name in MODEL_FILES if (Path(model) / name).exists()]
    if names:
        raise click.UsageError(
            f"{model} is a folder with a quantized model, and this command takes a float one: give the file "
            "that the folder was calibrated from."
        )
    raise click.UsageError(f"{model} is a folder: give the file of a model.")


def load_model(model: str, allow: tuple[str, ...]) -> Any:
    """Loads a saved model, or imports an ONNX file."""
    import qtrace
    from qtrace.data import import_object, is_installed

    _check_no_folder(model)
    if is_onnx(model):
        return qtrace.from_onnx(model)
    check_model(model)
    if is_factory(model):
        raise click.UsageError(f"{model} is code; this command takes a file that qtrace wrote.")
    for name in allow:  # a backend is named by the model's record alone, and is imported by nobody else
        if is_installed(name.partition(":")[0]):
            import_object(name)
    return qtrace.load(model, allow=allow)


def load_float(name: str | None, allow: tuple[str, ...], quantized: Any) -> Any:
    """Loads the float network of a quantized model, whose shapes an ONNX file with open sizes takes.

    Args:
        name: the file; None for no network.
        allow: the user's own classes that the file may name.
        quantized: the quantized model.
    """
    import qtrace
    from qtrace.graph.interface import list_inputs, read_interface
    from qtrace.importing.onnx import open_inputs

    if name is None or not is_onnx(name):
        return None if name is None else load_model(name, allow)
    interface = read_interface(quantized)
    traced = zip(interface.inputs if interface else (), list_inputs(quantized), strict=False)
    known = {info.name: shape for info, (_, shape) in traced}
    shapes = {key: known[key] for key in open_inputs(name) if key in known}
    return qtrace.from_onnx(name, shapes)


def preprocessing(model: Any, recipe: str | None, allow_code: bool = False) -> Any:
    """Returns the config with the data's preprocess: the one of ``recipe``, or else of the quantized model.

    Options of images change it.
    """
    from qtrace.preparation.model import QuantizedModel, is_quantized

    if recipe:
        return load_recipe(recipe, allow_code)
    return change_config(QuantizedModel(model).config if is_quantized(model) else None)


def load_recipe(recipe: str, allow_code: bool = False) -> Any:
    """Loads a recipe, with the preprocess that the command's options of images say."""
    import qtrace

    return change_config(qtrace.load_recipe(recipe, allow_code=allow_code))


def open_source(
    source: str,
    console: Console,
    *,
    qconfig: Any = None,
    batch_size: int,
    max_batches: int | None,
    skip_bad: bool,
) -> DataSource:
    """Opens --data with the recipe's preprocess, and notes which arrays are left out."""
    from qtrace.data import open_data
    from qtrace.quantizing.call_data import note_pixels

    preprocess = getattr(qconfig, "preprocess", None)
    reading: dict[str, Any] = {"batch_size": batch_size, "max_batches": max_batches, "skip_bad": skip_bad}
    try:
        data = open_data(source, preprocess=preprocess, **reading)
    except DataError as error:
        raise DataError(own_flags(str(error))) from error
    if data.skipped:
        console.note(f"{source}: taken for labels and left out: {', '.join(data.skipped)}")
    context = click.get_current_context(silent=True)
    if context is None or not context.meta.get(_NOTED):  # once, not for each source
        note_pixels(data, preprocess, console)
        warn_unused(data, qconfig, console)
    if context is not None:
        context.meta[_NOTED] = True
    return data


def check_stage(model: Any, name: str, stage: str | None = None) -> None:
    """Refuses a model of another stage before any data is read.

    Args:
        model: the model.
        name: the file of the model.
        stage: ``prepared`` or ``converted``; None for either.

    Raises:
        GraphError: naming the file to give instead.
    """
    from qtrace.preparation.model import QuantizedModel, check_quantized

    if stage is not None:
        QuantizedModel(model, stage)
    else:
        check_quantized(model, name)


def check_size(model: Any, name: str, qconfig: Any, data: str) -> None:
    """Refuses a recipe whose image size the model does not take, before the images are read.

    A size other than the traced one is tried on zeros, as many models take it.

    Raises:
        ConfigError: naming both sizes.
    """
    import numpy as np

    from qtrace.data.batches import as_arguments, evaluating, translate_errors
    from qtrace.errors import CalibrationError, ConfigError
    from qtrace.graph.interface import list_inputs, read_inputs

    preprocess = getattr(qconfig, "preprocess", None)
    if preprocess is None or not Path(data).is_dir():
        return
    inputs, size = list_inputs(model), tuple(preprocess.size)
    shape = tuple(inputs[0][1])
    if len(inputs) != 1 or shape[1:] == size:
        return
    try:
        zeros = as_arguments((np.zeros((*shape[:1], *size), np.float32),), model, 0)
        with evaluating(model), translate_errors(model, zeros, 0):
            model(*zeros[0], **zeros[1])
            engine.synchronize()
    except CalibrationError as error:
        if read_inputs(model):
            raise ConfigError(
                f"the recipe makes images {_format_shape(size)}, and {name} takes "
                f"{_format_shape(shape[1:])}: give --image-size {_format_shape(shape[1:])}, or import a file "
                "that leaves the size open."
            ) from error
        raise ConfigError(
            f"the recipe makes images {_format_shape(size)}, and {name}, which was traced with "
            f"{_format_shape(shape[1:])}, does not take them: trace it with --shape "
            f"{_format_shape((1, *size))}, or give --image-size {_format_shape(shape[1:])}."
        ) from error


def _format_shape(shape: tuple[int, ...]) -> str:
    return "x".join(str(number) for number in shape)


def trace_factory(
    name: str,
    *,
    shapes: Shapes = (),
    data: DataSource | None = None,
    method: str = "forward",
    check: bool = True,
    allow_branch: Sequence[str] = (),
) -> Any:
    """Calls the factory and traces what it returns, on random inputs or on the first batch.

    An ONNX file is imported with the shapes of the first batch.
    """
    import qtrace

    if is_onnx(name) and data is not None:
        from qtrace.quantizing.sources import open_shapes

        return qtrace.from_onnx(name, open_shapes(name, next(iter(data))))
    module = build_module(name)
    if shapes:
        example = _random_inputs(shapes)
    elif data is not None:
        example = _by_position(module, method, next(iter(data)), data.source)
    else:
        option = "--shape or --data" if _has_option("data") else "--shape, such as --shape 1x3x224x224"
        raise click.UsageError(f"{name} must be traced: give {option}.")
    return qtrace.trace(module, *example, method=method, check=check, allow_branch=allow_branch)


def _has_option(name: str) -> bool:
    context = click.get_current_context(silent=True)
    return context is None or any(parameter.name == name for parameter in context.command.params)


def build_module(name: str) -> Any:
    """Calls the factory ``pkg.mod:factory``; returns its Module."""
    from megengine.module import Module

    from qtrace.data import blame, import_object

    check_factory(name)
    target = import_object(name)
    if isinstance(target, Module):
        return target
    if not callable(target):
        raise TraceError(
            f"{name} is a {type(target).__name__}; name a function or class that makes a Module."
        )
    try:
        module = target()
    except (QtraceError, Terminated):
        raise
    except (Exception, SystemExit) as error:
        raise TraceError(blame(name, "calling it without arguments", error)) from error
    if not isinstance(module, Module):
        raise TraceError(f"{name} returned {type(module).__name__}, not a megengine.module.Module.")
    return module


def _random_inputs(shapes: Shapes) -> tuple[Any, ...]:
    import numpy as np

    generator = np.random.default_rng(0)
    return tuple(generator.standard_normal(shape, dtype=np.float32) for shape in shapes)


def _by_position(module: Any, method: str, batch: Batch, source: str) -> tuple[Any, ...]:
    """Returns a batch as positional inputs; named arrays follow the parameters of ``method``."""
    if isinstance(batch, tuple):
        return batch
    names = list(inspect.signature(getattr(module, method, module.forward)).parameters)
    expected = names[: len(batch)]
    if set(expected) != set(batch):
        raise TraceError(
            f"{source} has the inputs {', '.join(batch)}, but {type(module).__name__}.{method} takes "
            f"{', '.join(names)}; name the arrays after its first parameters."
        )
    return tuple(batch[name] for name in expected)

"""The models and data that the command line names, and the options that say how images become inputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from qtrace import process
from qtrace.cli.console import Console
from qtrace.errors import DataError, QtraceError, Terminated, TraceError

if TYPE_CHECKING:
    from qtrace.config import QConfig
    from qtrace.data import (
        Batch,  # at run time it loads numpy, which --help does without
        DataSource,
    )

PREPARED, CONVERTED = "prepared.mge", "quantized.mge"
MODEL_FILES = (PREPARED, CONVERTED)
"""The models in an output folder of `qtrace calibrate` and `qtrace finetune`."""

_FORMATS = {
    ".tflite": "a TFLite file",
    ".param": "an ncnn net",
    ".caffemodel": "a Caffe file",
    ".prototxt": "a Caffe file",
    ".pt": "a PyTorch file",
    ".pth": "a PyTorch file",
}
_WEIGHTS = (".pkl", ".pickle", ".npz", ".tar", ".ckpt")


def check_factory(name: str) -> None:
    """Raises UsageError when ``name`` names a file, or is not of the form ``pkg.mod:factory``."""
    from qtrace.data import is_object_name

    problem = _python_file(name) or _model_file(name)
    if not problem and not is_object_name(name):
        problem = f"{name!r} is not of the form pkg.mod:factory, such as models:resnet18."
    if problem:
        raise click.UsageError(problem)


def check_exported(path: Path) -> None:
    """Raises UsageError when ``path`` is a folder of `qtrace calibrate`, or one of its models."""
    models = [path / name for name in (CONVERTED, PREPARED) if (path / name).exists()]
    if not models and path.name in MODEL_FILES:
        models = [path]
    if models:
        what = "model" if models[0] == path else "folder with models"
        raise click.UsageError(
            f"{path} is a {what} of qtrace, and this command "
            f"takes an exported file: write one by `qtrace export {models[0]} -o model.onnx`, and give that."
        )


def check_model(name: str) -> None:
    """Raises UsageError when ``name`` names a Python file in place of ``pkg.mod:factory``."""
    problem = _python_file(name)
    if problem:
        raise click.UsageError(problem)


def _python_file(name: str) -> str:
    """Explains what to write in place of ``file.py:factory``; "" for other names."""
    file, _, factory = name.partition(":")
    if not file.endswith(".py") or "\0" in file or (factory and Path(name).exists()):
        return ""
    folder, module = str(Path(file).parent), Path(file).stem
    import_path = "" if folder == "." else f", from within the folder {folder} or with it in PYTHONPATH"
    return f"{name} names a Python file: name its module, {module}:{factory or 'FACTORY'}{import_path}."


def _model_file(name: str) -> str:
    """Explains what to write in place of the file of a model; "" for other names."""
    path = Path(name)
    if ":" in name or "\0" in name:
        return ""
    suffix = path.suffix.lower()
    code = "write a function that builds the Module, and name it as pkg.mod:function"
    if suffix == ".mge":
        return f"{name} is a file that was traced already: go on with `qtrace calibrate {name}`."
    if suffix == ".onnx":
        return f"{name} is an ONNX file: `qtrace import {name} -o float.mge` makes a traced model of it."
    if suffix in _FORMATS:
        return f"{name} is {_FORMATS[suffix]}, and a MegEngine Module is traced: {code}."
    if suffix in _WEIGHTS:
        return f"{name} holds weights or pickled objects: {code}; it may load the file with megengine.load."
    if path.is_file():
        return f"{name} is a file, and a MegEngine Module is traced: {code}."
    return ""


def note_ends(model: Any, path: Path, console: Console) -> dict[str, list[dict[str, Any]]]:
    """Notes name, type and shape of each input and output.

    Args:
        model: a traced module, of any stage.
        path: the file that was written; the names and types of an ONNX file are read from it.
        console: prints the note.

    Returns:
        The inputs and outputs as plain data; a free axis is the text that names it.
    """
    ends = _of_onnx(path) if path.suffix.lower() == ".onnx" else _of_graph(model)
    for kind, tensors in ends.items():
        shown = ", ".join(f"{t['name']} {t['dtype']} {'x'.join(map(str, t['shape']))}" for t in tensors)
        console.note(f"{kind}: {shown}")
    return ends


def _of_onnx(path: Path) -> dict[str, list[dict[str, Any]]]:
    import onnx

    from qtrace.onnxfile.external_data import read_model

    graph = read_model(path).graph
    ends: dict[str, list[dict[str, Any]]] = {}
    for kind, infos in (("inputs", graph.input), ("outputs", graph.output)):
        ends[kind] = [
            {
                "name": info.name,
                "dtype": onnx.helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type).name,
                "shape": [d.dim_param or d.dim_value for d in info.type.tensor_type.shape.dim],
            }
            for info in infos
        ]
    return ends


def _of_graph(model: Any) -> dict[str, list[dict[str, Any]]]:
    import numpy as np

    from qtrace.graph.types import TensorNode

    graph = model.graph
    return {
        kind: [
            {"name": n.name, "dtype": np.dtype(n.dtype).name, "shape": list(n.shape or ())}
            for n in nodes
            if isinstance(n, TensorNode)
        ]
        for kind, nodes in (("inputs", graph.inputs[1:]), ("outputs", graph.outputs))
    }


_META = "qtrace.images"  # in the context of the command: option -> its flag and its value


class _Numbers(click.ParamType):
    """One number, or one for each channel with commas between them; a fraction such as 1/255 is one, too."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[float]:
        try:
            return [_number(part) for part in str(value).split(",")]
        except (ValueError, ZeroDivisionError):
            self.fail(f"{value!r} are no numbers, such as 0.5 or 123.675,116.28,103.53.", param, ctx)


def _number(text: str) -> float:
    above, _, below = text.partition("/")
    return float(above) / float(below) if below else float(above)


class _Size(click.ParamType):
    """Height and width, or channels, height and width."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        parts = str(value).lower().split("x")
        if len(parts) not in (2, 3) or not all(part.isascii() and part.isdigit() for part in parts):
            self.fail(f"{value!r} is no size, such as 224x224 or 1x32x32 for grey images.", param, ctx)
        return [int(part) for part in parts]


def _keep(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    if value is not None:
        context.meta.setdefault(_META, {})[parameter.name] = (parameter.opts[0], value)


_OPTIONS: tuple[tuple[str, Any, str], ...] = (
    ("size", _Size(), "HxW or CxHxW, the size that images are brought to."),
    (
        "mean",
        _Numbers(),
        "What is subtracted from the channels of images, after --scale, such as 123.675,116.28,103.53.",
    ),
    ("std", _Numbers(), "Last, the image channels are divided by this, such as 58.395,57.12,57.375."),
    ("scale", _Numbers(), "First, pixels (0 to 255) are multiplied by this, e.g. 1/255."),
    ("channels", click.Choice(["bgr", "rgb"]), "The order of channels that the model takes."),
    ("resize", click.Choice(["stretch", "center_crop", "letterbox"]), "How images get their size."),
    ("layout", click.Choice(["nchw", "nhwc"]), "The axes of uint8 arrays of pixels."),
)


def images(reserved: Sequence[str] = ()) -> Callable[..., Any]:
    """Adds --size, --mean, --std, --scale, --channels, --resize and --layout, and each as --image-NAME.

    What they say is kept in the command's context, for `change_config`.

    Args:
        reserved: the names that are another option of the command: they have only the long form.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for name, kind, text in reversed(_OPTIONS):
            flags = [f"--image-{name}"] if name in reserved else [f"--{name}", f"--image-{name}"]
            option = click.option(
                *flags,
                f"image_{name}",
                type=kind,
                metavar=None if isinstance(kind, click.Choice) else name.upper(),
                callback=_keep,
                expose_value=False,
                help=f"{text} Overrides the recipe's preprocess.",
            )
            function = option(function)
        return function

    return decorate


def _chosen() -> dict[str, tuple[str, Any]]:
    context = click.get_current_context(silent=True)
    chosen = {} if context is None else context.meta.get(_META, {})
    return {name.removeprefix("image_"): entry for name, entry in chosen.items()}


def chosen_words() -> list[str]:
    """Returns the options as words of a command line, to be repeated in another command."""
    words: list[str] = []
    for name, (flag, value) in _chosen().items():
        sign = "x" if name == "size" else ","
        words += [flag, value if isinstance(value, str) else sign.join(f"{n!r}" for n in value)]
    return words


def own_flags(text: str) -> str:
    """Returns a message that names the options as the running command has them: ``--image-size`` in tune."""
    context = click.get_current_context(silent=True)
    for option in () if context is None else context.command.params:
        name = str(option.name).removeprefix("image_")
        if name != option.name and f"--{name}" not in option.opts:
            text = text.replace(f"--{name}", option.opts[0])
    return text


def change_config(config: QConfig | None) -> QConfig | None:
    """Returns a config whose ``preprocess`` is as the options of the command say.

    Args:
        config: the config of the recipe or of the model; None for no config.

    Raises:
        ConfigError: when the result is no complete ``preprocess``.
    """
    chosen = _chosen()
    if not chosen:
        return config
    from qtrace.config import QConfig
    from qtrace.errors import ConfigError

    known = None if config is None else config.preprocess
    values = {} if known is None else dict(known.to_dict())
    flags = ", ".join(flag for flag, _ in chosen.values())
    if missing := [name for name in ("size", "mean", "std") if name not in values and name not in chosen]:
        raise ConfigError(
            f"{flags}: the recipe says nothing of images, so give "
            f"{own_flags(' and '.join(f'--{n}' for n in missing))}, too."
        )
    if "resize" in chosen:  # what says more about another way
        for name in ("crop_fraction", "fill", "fill_at"):
            values.pop(name, None)
    channels = len(chosen["mean"][1]) if "mean" in chosen else len(values.get("mean", ())) or 3
    for name, (_, value) in chosen.items():
        values[name] = value[0] if name == "scale" and len(value) == 1 else value
    size = values["size"]
    values["size"] = (
        size if len(size) == 3 else [3 if channels == 1 and "mean" in chosen else channels, *size]
    )
    for name in ("mean", "std"):
        if len(values[name]) == 1:
            values[name] = list(values[name]) * values["size"][0]
    try:
        checked = QConfig.model_validate({"preprocess": values})
    except ConfigError as error:
        raise ConfigError(f"{flags}: {error}") from error
    return checked if config is None else config.model_copy(update={"preprocess": checked.preprocess})


def warn_unused(source: str | DataSource, config: QConfig | None, console: Console) -> None:
    """Warns of options that change nothing, as the data holds no pixels.

    Args:
        source: the data, or its name.
        config: the config with the options.
        console: takes the warning.
    """
    chosen = _chosen()
    if not chosen or config is None:
        return
    if isinstance(source, str):
        from qtrace.data import open_data

        source = open_data(source, preprocess=config.preprocess)
    if not source.pixels:
        console.warn(
            f"{source.source} holds no images and no uint8 pixels of four axes: its values are inputs as "
            f"they are, and {', '.join(flag for flag, _ in chosen.values())} change nothing."
        )


_NOTED = "qtrace.pixels_noted"  # in the context of a command

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class NamedModel:
    """A model that the command line names.

    Attributes:
        name: a file, an ONNX file, a folder of `qtrace calibrate`, or ``pkg.mod:factory``.
        allow: the user's own classes that a file may name.
    """

    name: str
    allow: tuple[str, ...] = ()

    @property
    def is_factory(self) -> bool:
        """Whether it is ``pkg.mod:factory`` rather than a file."""
        from qtrace.data import is_object_name

        return is_object_name(self.name) and not Path(self.name).exists()

    @property
    def needs_example(self) -> bool:
        """Whether it becomes a graph by the data: a factory, or an ONNX file with open sizes."""
        if is_onnx(self.name):
            from qtrace.importing.onnx import open_inputs

            return bool(open_inputs(self.name))
        return self.is_factory

    def in_folder(self, file: str) -> NamedModel:
        """Returns the model ``file`` of a folder that `qtrace calibrate` wrote, or else the model itself.

        Args:
            file: which of the folder's models the command takes, of `MODEL_FILES`.

        Raises:
            UsageError: when the folder lacks such a file.
        """
        if not Path(self.name).is_dir():
            return self
        path = Path(self.name) / file
        if not path.exists():
            raise click.UsageError(
                f"{self.name} is a folder without {file}: give a file, or a folder that `qtrace calibrate` "
                "has written."
            )
        return replace(self, name=str(path))

    def load(self) -> Any:
        """Loads a saved model, or imports an ONNX file."""
        import qtrace

        _check_no_folder(self.name)
        if is_onnx(self.name):
            return qtrace.from_onnx(self.name)
        check_model(self.name)
        if self.is_factory:
            raise click.UsageError(f"{self.name} is code; this command takes a file that qtrace wrote.")
        import_classes(self.allow)
        return qtrace.load(self.name, allow=self.allow)

    def load_or_trace(self, shapes: Shapes) -> Any:
        """Loads the model, or calls the factory and traces what it returns on random inputs of ``shapes``."""
        return trace_factory(self.name, shapes=shapes) if self.is_factory else self.load()

    def load_for(self, data: NamedData, qconfig: Any) -> Any:
        """Loads a float model that takes the data; None for one that is traced on it."""
        if self.needs_example:
            return None
        traced = self.load()
        check_size(traced, self.name, qconfig, data.name)
        return traced

    def load_float(self, name: str | None, quantized: Any) -> Any:
        """Loads the float network of this model, whose shapes an ONNX file with open sizes takes.

        Args:
            name: the file of the float network; None for no network.
            quantized: this model, loaded.
        """
        import qtrace
        from qtrace.graph.interface import list_inputs, read_interface
        from qtrace.importing.onnx import open_inputs

        if name is None or not is_onnx(name):
            return None if name is None else NamedModel(name, self.allow).load()
        interface = read_interface(quantized)
        traced = zip(interface.inputs if interface else (), list_inputs(quantized), strict=False)
        known = {info.name: shape for info, (_, shape) in traced}
        shapes = {key: known[key] for key in open_inputs(name) if key in known}
        return qtrace.from_onnx(name, shapes)


@dataclass(frozen=True)
class NamedRecipe:
    """A recipe that the command line names.

    Attributes:
        name: its name or file; None for none.
        allow_code: whether it may name code of its own.
        float_type: the type of what stays float; None for the recipe's.
    """

    name: str | None
    allow_code: bool = False
    float_type: Literal["fp32", "fp16"] | None = None

    def load(self) -> Any:
        """Loads the recipe, with the preprocess that the command's options of images say; None for none."""
        import qtrace

        if self.name is None:
            return change_config(None)
        config = qtrace.load_recipe(self.name, allow_code=self.allow_code)
        if self.float_type is not None:
            config = config.model_copy(update={"float": self.float_type})
        return change_config(config)


@dataclass(frozen=True)
class NamedData:
    """Data that the command line names.

    Attributes:
        name: the value of --data.
        reading: how it is read: ``batch_size``, ``max_batches`` and ``skip_bad``.
    """

    name: str
    reading: Mapping[str, Any]

    def other(self, name: str) -> NamedData:
        """Returns other data that is read in the same way."""
        return replace(self, name=name)

    def open(self, console: Console, qconfig: Any) -> DataSource:
        """Opens the data with the config's preprocess, and notes which arrays are left out."""
        from qtrace.data import open_data
        from qtrace.quantizing.call_data import note_pixels

        preprocess = getattr(qconfig, "preprocess", None)
        try:
            source = open_data(self.name, preprocess=preprocess, **self.reading)
        except DataError as error:
            raise DataError(own_flags(str(error))) from error
        if source.skipped:
            console.note(f"{self.name}: taken for labels and left out: {', '.join(source.skipped)}")
        context = click.get_current_context(silent=True)
        if context is None or not context.meta.get(_NOTED):  # once, not for each source
            note_pixels(source, preprocess, console)
            warn_unused(source, qconfig, console)
        if context is not None:
            context.meta[_NOTED] = True
        return source

    def open_for(self, loaded: Any, model: NamedModel, recipe: NamedRecipe, console: Console) -> DataSource:
        """Opens the data for a model, with the preprocess of the recipe or else of the model.

        Args:
            loaded: the model.
            model: its name.
            recipe: the recipe of --recipe.
            console: takes the notes.
        """
        qconfig = preprocessing(loaded, recipe)
        check_size(loaded, model.name, qconfig, self.name)
        return self.open(console, qconfig)


def is_onnx(model: str) -> bool:
    """Whether MODEL is the name of an ONNX file."""
    return Path(model).suffix.lower() == ".onnx"


def import_classes(names: Sequence[str]) -> None:
    """Imports the user's own classes: a backend is named by a model's record, and imported by nobody else."""
    from qtrace.data import import_object, is_installed

    for name in names:
        if is_installed(name.partition(":")[0]):
            import_object(name)


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


def preprocessing(model: Any, recipe: NamedRecipe | None = None) -> Any:
    """Returns the config with the data's preprocess: the one of ``recipe``, or else of the quantized model.

    Options of images change it.
    """
    from qtrace.preparation.model import QuantizedModel, is_quantized

    if recipe is not None and recipe.name:
        return recipe.load()
    return change_config(QuantizedModel(model).config if is_quantized(model) else None)


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
            process.synchronize()
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

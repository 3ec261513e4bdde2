"""Options that several commands share."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from qtrace import plugins
from qtrace.cli.console import Console
from qtrace.cli.images import images

__all__ = [
    "NamedShapeType",
    "ShapeType",
    "allow",
    "allow_code",
    "collecting",
    "data",
    "derived",
    "example",
    "file_or_folder",
    "grouped",
    "importable",
    "input_shapes",
    "output",
    "prefer",
    "progress",
    "recipe",
]

_MAX_VALUES = 2**30  # 4 GiB of float32


class ShapeType(click.ParamType):
    """Converts ``1x3x224x224`` to a tuple of integers."""

    name = "shape"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parses one shape."""
        if isinstance(value, tuple):
            return value
        parts = str(value).lower().split("x")
        if not all(part.isascii() and part.isdigit() and len(part) < 10 and int(part) for part in parts):
            self.fail(f"{value!r} is not a shape such as 1x3x224x224.", param, ctx)
        shape = tuple(int(part) for part in parts)
        if math.prod(shape) > _MAX_VALUES:
            self.fail(f"{value!r} has more than 2**30 values.", param, ctx)
        return shape


class NamedShapeType(click.ParamType):
    """Converts ``x=1x3x48x320`` to a name and a tuple of integers."""

    name = "input=shape"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parses one named shape."""
        if isinstance(value, tuple):
            return value
        name, equals, shape = str(value).rpartition("=")
        if not equals or not name:
            self.fail(f"{value!r} is not an input and its shape, such as x=1x3x48x320.", param, ctx)
        return name, ShapeType().convert(shape, param, ctx)


class _Seconds(click.FloatRange):
    """A number of seconds; refuses NaN, which passes every bound."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if math.isnan(seconds := super().convert(value, param, ctx)):
            self.fail(f"{value!r} is not a number of seconds.", param, ctx)
        return seconds


def file_or_folder() -> click.Path:
    """A path as a Path; commands check it where they use it, with clearer messages."""
    return click.Path(path_type=Path)


def _all(*options: Callable[..., Any]) -> Callable[..., Any]:
    """Combines options to one decorator; --help shows them in this order."""
    return lambda function: functools.reduce(lambda f, option: option(f), reversed(options), function)


def grouped(key: str, *names: str) -> Callable[..., Any]:
    """Gives a command those of the options ``names`` that it has as one dict, its argument ``key``."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def command(**arguments: Any) -> Any:
            given = {name: arguments.pop(name) for name in names if name in arguments}
            return function(**{key: given}, **arguments)

        return command

    return decorate


def importable(_: click.Context, __: click.Parameter, value: Any) -> Any:
    """Lets the user's own code be imported from the current folder, as factories are; a callback of click."""
    if value:
        plugins.search_current_folder()
    return value


allow = click.option(
    "--allow",
    metavar="PKG.MOD:NAME",
    multiple=True,
    callback=importable,
    help="Also accept this class of your own in a model file. Repeatable; only for files that you trust.",
)

allow_code = click.option(
    "--allow-code",
    is_flag=True,
    callback=importable,
    help="Let a recipe name code of its own (pkg.mod:Class), which is run; only for recipes that you trust.",
)


def recipe(default: str | None = None) -> Callable[..., Any]:
    """Adds --recipe and --allow-code."""
    return _all(
        click.option(
            "--recipe",
            "-r",
            metavar="R",
            default=default,
            show_default=default is not None,
            help="A recipe: its name (see `recipes list`), a family+target (vit+tensorrt), a precision "
            "(w8a16, w4a8+qnn), or a YAML file.",
        ),
        allow_code,
    )


float_type = click.option(
    "--float",
    "float_type",
    type=click.Choice(["fp32", "fp16"]),
    help="The type of what stays float in .onnx files: fp16 where ranges allow it. Default: the recipe's.",
)

example = click.option(
    "--shape",
    "shapes",
    type=ShapeType(),
    multiple=True,
    help="Shape of a random float32 input, such as 1x3x224x224. Repeat it for more inputs.",
)


def _named_shapes(_: click.Context, __: click.Parameter, value: Any) -> dict[str, tuple[int, ...]]:
    """Returns input -> shape; refuses an input that is named twice."""
    if len(dict(value)) < len(value):
        raise click.UsageError("--shape names an input twice.")
    return dict(value)


input_shapes = click.option(
    "--shape",
    "shapes",
    type=NamedShapeType(),
    multiple=True,
    callback=_named_shapes,
    help="Shape of an input whose sizes the file leaves open, such as x=1x3x48x320. Repeat it for more.",
)


def data(required: bool, batch_size: int = 8, reserved: Sequence[str] = ()) -> Callable[..., Any]:
    """Adds --data and the options of images; --batch-size, --max-batches and --skip-bad as ``reading``.

    Args:
        required: whether --data must be given.
        batch_size: the default of --batch-size.
        reserved: options of images that have only their long form, see `images`.
    """
    return _all(
        click.option(
            "--data",
            "-d",
            metavar="D",
            required=required,
            help="An .npy or .npz file (first axis: samples), a folder of images, or pkg.mod:loader.",
        ),
        click.option(
            "--batch-size",
            type=click.IntRange(1),
            default=batch_size,
            show_default=True,
            help="Samples per batch, as --max-batches counts them.",
        ),
        click.option("--max-batches", type=click.IntRange(1), help="Stop after this many batches."),
        click.option("--skip-bad", is_flag=True, help="Leave out unreadable images, and name them."),
        images(reserved),
        grouped("reading", "batch_size", "max_batches", "skip_bad"),
    )


prefer = click.option(
    "--prefer",
    type=click.Choice(["speed", "balanced", "accuracy"]),
    help="Ops on integers: all that gain time, those worth their noise, or none; default: the recipe's.",
)

progress = click.option("--progress", is_flag=True, help="Show progress even if stderr is no terminal.")


def derived(cls: Any, into: str, **texts: str) -> Callable[..., Any]:
    """Derives options from the fields of a dataclass; the command gets them as the dict ``into``.

    Args:
        cls: the dataclass. Fields that other decorators have declared are in the dict, too.
        into: the name of the command's argument.
        **texts: field -> its help; a switch that is on becomes ``--no-FIELD``, a number is 0 or more.
    """
    known = {field.name: field for field in dataclasses.fields(cls)}
    added = _all(*(_option_of(known[name], text) for name, text in texts.items()))
    return lambda function: added(grouped(into, *known)(function))


def _option_of(field: dataclasses.Field[Any], text: str) -> Callable[..., Any]:
    flag = field.name.replace("_", "-")
    if field.type != "bool":
        return click.option(f"--{flag}", type=click.FloatRange(0), help=text)
    if field.default:
        return click.option(
            f"--no-{flag}", field.name, is_flag=True, flag_value=False, default=True, help=text
        )
    return click.option(f"--{flag}", is_flag=True, help=text)


def output(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds --json and --quiet; the command gets them and --progress as its argument ``console``."""

    @functools.wraps(function)
    def command(quiet: bool, as_json: bool, progress: bool = False, **arguments: Any) -> Any:
        return function(console=Console(quiet, as_json, progress), **arguments)

    return _all(
        click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON document."),
        click.option(
            "--quiet", "-q", is_flag=True, help="No progress and no notes on stderr, only warnings."
        ),
    )(command)


def collecting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options of collecting statistics; the command gets them as the dict ``collecting``."""
    return _all(
        click.option(
            "--engine",
            type=click.Choice(["auto", "megengine", "onnxruntime"]),
            default="auto",
            show_default=True,
            help="The engine that computes activations; auto takes the fastest that applies, and names it.",
        ),
        click.option(
            "--threads",
            type=click.IntRange(1),
            help="Threads of onnxruntime in each process; default: all cores.",
        ),
        click.option(
            "--workers",
            type=click.IntRange(1, 1024),
            default=1,
            show_default=True,
            help="Processes that share the batches.",
        ),
        click.option(
            "--ray",
            metavar="ADDRESS",
            is_flag=False,
            flag_value="",
            help="Run the workers on a Ray cluster; without ADDRESS on a local one.",
        ),
        click.option(
            "--checkpoint-batches", "every", type=click.IntRange(1), help="Batches between checkpoints."
        ),
        click.option(
            "--checkpoint-seconds",
            "seconds",
            type=_Seconds(0),
            default=60.0,
            show_default=True,
            help="Seconds between checkpoints.",
        ),
        grouped("collecting", "engine", "threads", "workers", "ray", "every", "seconds"),
    )(function)

"""Commands with an example, and the options that several of them share."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click

from qtrace import plugins
from qtrace.cli.console import Console
from qtrace.cli.models import MODEL_FILES, NamedData, NamedModel, NamedRecipe, images
from qtrace.errors import QtraceError
from qtrace.runtimes.host import IDLE_SECONDS, RuntimeHost
from qtrace.storage.outputs import check_foreign, output_file

__all__ = [
    "Command",
    "Dumps",
    "FileToWrite",
    "Group",
    "NamedShapeType",
    "ShapeType",
    "allow",
    "allow_code",
    "allowed_classes",
    "collecting",
    "command",
    "data",
    "derived",
    "dumped",
    "example",
    "file_or_folder",
    "file_to_write",
    "folder_to_write",
    "grouped",
    "importable",
    "input_shapes",
    "output",
    "prefer",
    "progress",
    "recipe",
    "runtime",
    "runtime_host",
]


class Command(click.Command):
    """A command whose help ends with an example."""

    def __init__(self, *args: Any, example: str, **kwargs: Any) -> None:
        kwargs.setdefault("no_args_is_help", True)
        super().__init__(*args, **kwargs)
        self.example = example

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses arguments; refuses an empty one, such as a shell variable that is not set, and NaN."""
        for before, text in itertools.pairwise(["", *args]):
            if not text or (text.startswith("--") and text.endswith("=")):
                flag = text[:-1] or before
                name = flag if flag.startswith("-") else "an argument"
                raise click.UsageError(f"{name} is empty: give a value, or leave it out.", ctx)
        rest = super().parse_args(ctx, args)
        for option in self.params:
            if isinstance(value := ctx.params.get(option.name or ""), float) and math.isnan(value):
                raise click.BadParameter("NaN passes every bound: give a number.", ctx, option)
        return rest

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the example without wrapping, unlike an epilog."""
        with formatter.section("Example"):
            for line in self.example.strip().splitlines():
                formatter.write(f"  {line.strip()}\n")


class Group(Command, click.Group):
    """A group of commands whose help ends with an example."""

    command_class = Command


def command(name: str | None = None, **settings: Any) -> Callable[..., Any]:
    """Makes a `Command` of a function; see `click.command`."""
    return click.command(name, cls=Command, **settings)


runtime = click.option(
    "--runtime",
    metavar="NAME",
    callback=lambda ctx, parameter, value: importable(ctx, parameter, value),
    help="The runtime, such as openvino for an .onnx, or pkg.mod:NAME of your own; by default the one that "
    "the file is meant for.",
)


def runtime_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds --runtime-python, --runner and --runtime-timeout; the command gets them as ``runtime_host``."""

    @click.option(
        "--runtime-python",
        metavar="PATH",
        help="Run the runtime in this interpreter, such as ~/venvs/ship/bin/python, which needs numpy and "
        "the runtime alone (Python 3.8 or later).",
    )
    @click.option(
        "--runner",
        metavar="COMMAND",
        help="Run the runtime by a command that starts Python elsewhere, such as 'ssh board python3'; files "
        "are copied through it, and nothing is left there.",
    )
    @click.option(
        "--runtime-timeout",
        metavar="SECONDS",
        type=click.FloatRange(0, min_open=True),
        help="With either: stop a runtime idle (no answer, no computing) this long; default: "
        f"{IDLE_SECONDS:g}.",
    )
    @functools.wraps(function)
    def with_host(
        *args: Any, runtime_python: str | None, runner: str | None, runtime_timeout: float | None, **kw: Any
    ) -> Any:
        host = None
        if runtime_python is not None or runner is not None:
            host = RuntimeHost(runtime_python or "", runner or "", runtime_timeout or IDLE_SECONDS)
        elif runtime_timeout is not None:
            raise click.UsageError("--runtime-timeout belongs to --runtime-python or --runner.")
        return function(*args, runtime_host=host, **kw)

    return with_host


@dataclass(frozen=True)
class Dumps:
    """Where the dumped tensors are, and how they are called and stored.

    Attributes:
        folder: the folder, or an .npz archive.
        names: a YAML file with name in the dump: name in the graph; None if they are the same.
        layout: the order of axes.
    """

    folder: str
    names: str | None
    layout: str

    def runtime(self, model: Any) -> Any:
        """Returns the runtime that reads the tensors of ``model``, a converted module."""
        from qtrace.extras.device import dumped_tensors

        return dumped_tensors(self.folder, model, self._read_names(), self.layout)

    def _read_names(self) -> dict[str, str]:
        from qtrace.config.tree import read

        if self.names is None:
            return {}
        problems: list[str] = []
        try:
            tree = read(Path(self.names).read_text(encoding="utf-8"), self.names, problems)
        except (OSError, UnicodeDecodeError) as error:
            raise click.UsageError(f"{self.names} cannot be read: {error}.") from error
        names = None if tree is None else tree.plain()
        if problems:
            raise click.UsageError(problems[0])
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise click.UsageError(f"{self.names} must be a mapping of names in the dump to names of sites.")
        return {str(dumped): name for dumped, name in names.items()}


def dumped(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds --dumped, --names and --layout; the command gets them as its argument ``dumps``."""

    @click.option(
        "--dumped",
        metavar="DIR",
        help="Compare tensors that a device has dumped, in place of running FILE: an .npz file for each "
        "batch, or a folder of .npy, .raw or .bin files.",
    )
    @click.option(
        "--names",
        metavar="FILE",
        help="YAML with the names of dumped tensors: name in the dump: name of the site.",
    )
    @click.option(
        "--layout",
        metavar="L",
        default="nchw",
        show_default=True,
        help="How dumped tensors of four axes are stored: nchw, nhwc, or e.g. nc4hw4.",
    )
    @functools.wraps(function)
    def command(dumped: str | None, names: str | None, layout: str, **arguments: Any) -> Any:
        if dumped is None and (names is not None or layout != "nchw"):
            raise click.UsageError(
                "--names and --layout say how to read the tensors of --dumped: give it too."
            )
        return function(dumps=None if dumped is None else Dumps(dumped, names, layout), **arguments)

    return command


_DATA = ("data", "eval_data", "evaluation", "samples", "dumped")  # options that name whole folders


@dataclass(frozen=True)
class FileToWrite:
    """A file that a command writes.

    Attributes:
        path: the file.
        force: whether it may replace a file that qtrace did not write.
    """

    path: Path
    force: bool

    def open(self) -> AbstractContextManager[Path]:
        """Gives a file to write, which becomes the file at the end of the block."""
        return output_file(self.path, force=self.force)

    def write(self, text: str) -> None:
        """Writes the whole file."""
        with self.open() as partial:
            partial.write_text(text, encoding="utf-8")

    def write_graph(self, text: str, console: Console) -> None:
        """Writes a drawing for Graphviz, and notes how to see it."""
        self.write(text)
        console.note(f"{self.path} is written; `dot -Tsvg {self.path} -o graph.svg` draws it.")


def file_to_write(*flags: str, help: str, required: bool = False) -> Callable[..., Any]:
    """Adds an option that names a file to write, and --force; the command gets a `FileToWrite`, or None.

    The command does not begin if the file is one of its inputs, or if it exists, qtrace did not write it and
    --force is not given.

    Args:
        *flags: the flags of the option, the long one first.
        help: its help.
        required: whether it must be given.
    """
    name = flags[0].lstrip("-").replace("-", "_")

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def command(force: bool, **arguments: Any) -> Any:
            if (path := arguments[name]) is not None:
                _check_inputs(path, name)
                check_foreign(path, force=force)
                arguments[name] = FileToWrite(path, force)
            return function(**arguments)

        forced = click.option(
            "--force", is_flag=True, help=f"Let {flags[0]} replace a file that qtrace did not write."
        )
        option = click.option(*flags, type=file_or_folder(), required=required, help=help)
        return option(forced(command))

    return decorate


def folder_to_write(help: str) -> Callable[..., Any]:
    """Adds the required option --out, a folder; the command does not begin if an input is in that folder.

    Args:
        help: the help of the option.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def command(**arguments: Any) -> Any:
            if arguments["out"].is_dir():
                _check_inputs(arguments["out"], "out")
            return function(**arguments)

        return click.option("--out", "-o", type=file_or_folder(), required=True, help=help)(command)

    return decorate


def _check_inputs(path: Path, option: str) -> None:
    """Refuses to write a file that the command reads, or a folder that has such a file."""
    target = Path(os.path.realpath(path))
    if not target.exists():
        return
    for shown, file in _inputs(option):
        if file == target:
            raise QtraceError(f"{path} is an input of this command: name another {_kind(target)} to write.")
        if target.is_dir() and file.is_relative_to(target):
            raise QtraceError(f"{path} has an input of this command, {shown}: name another folder to write.")
        if file.is_dir() and target.is_file() and target.is_relative_to(file):
            raise QtraceError(f"{path} is in {shown}, an input of this command: name another file to write.")


def _kind(target: Path) -> str:
    return "folder" if target.is_dir() else "file"


def _inputs(option: str) -> Iterator[tuple[str, Path]]:
    """Yields what the running command reads: as the user wrote it, and its real path."""
    for name, value in click.get_current_context().params.items():
        for entry in value if isinstance(value, tuple) else (value,):
            if name == option or not isinstance(entry, str | Path) or not str(entry).strip("\0"):
                continue
            if name == "recipe" and not str(entry).lower().endswith((".yaml", ".yml")):
                continue  # the name of a recipe, which a folder may have, too
            path = Path(os.path.realpath(entry))
            if path.is_dir() and name not in _DATA:
                yield from ((str(entry), path / file) for file in MODEL_FILES)
            elif path.exists():
                yield str(entry), path


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


def file_or_folder() -> click.Path:
    """A path as a Path; commands check it where they use it, with clearer messages."""
    return click.Path(path_type=Path)


def _all(*options: Callable[..., Any]) -> Callable[..., Any]:
    """Combines options to one decorator; --help shows them in this order."""
    return lambda function: functools.reduce(lambda f, option: option(f), reversed(options), function)


def grouped(key: str, *names: str, into: Callable[..., Any] = dict) -> Callable[..., Any]:
    """Gives a command those of the options ``names`` that it has as one argument.

    Args:
        key: the argument.
        *names: the options.
        into: makes the argument of the options by name.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def command(**arguments: Any) -> Any:
            values = {name: arguments.pop(name) for name in names if name in arguments}
            return function(**{key: into(**values)}, **arguments)

        return command

    return decorate


def importable(_: click.Context, __: click.Parameter, value: Any) -> Any:
    """Lets the user's own code be imported from the current folder, as factories are; a callback of click."""
    if value:
        plugins.search_current_folder()
    return value


allowed_classes = click.option(
    "--allow",
    metavar="PKG.MOD:NAME",
    multiple=True,
    callback=importable,
    help="Also accept this class of your own in a model file. Repeatable; only for files that you trust.",
)


def allow(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds --allow; the command gets its argument ``model`` as a `NamedModel`."""

    def name_model(model: str | None, allow: tuple[str, ...]) -> NamedModel | None:
        return None if model is None else NamedModel(model, allow)

    return allowed_classes(grouped("model", "model", "allow", into=name_model)(function))


allow_code = click.option(
    "--allow-code",
    is_flag=True,
    callback=importable,
    help="Let a recipe name code of its own (pkg.mod:Class), which is run; only for recipes that you trust.",
)


def recipe(default: str | None = None) -> Callable[..., Any]:
    """Adds --recipe and --allow-code; the command gets ``recipe``, a `NamedRecipe`."""
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
        grouped(
            "recipe", "recipe", "allow_code", into=lambda recipe, allow_code: NamedRecipe(recipe, allow_code)
        ),
    )


def float_type(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds --float, which the argument ``recipe`` takes."""

    @functools.wraps(function)
    def command(recipe: NamedRecipe, float_type: Literal["fp32", "fp16"] | None, **arguments: Any) -> Any:
        return function(recipe=dataclasses.replace(recipe, float_type=float_type), **arguments)

    return click.option(
        "--float",
        "float_type",
        type=click.Choice(["fp32", "fp16"]),
        help="The type of what stays float in .onnx files: fp16 where ranges allow it. "
        "Default: the recipe's.",
    )(command)


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
    """Adds --data, the options of images, --batch-size, --max-batches and --skip-bad.

    The command gets ``data``, a `NamedData`; None without --data.

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
        grouped("data", "data", "batch_size", "max_batches", "skip_bad", into=_name_data),
    )


def _name_data(data: str | None, **reading: Any) -> NamedData | None:
    return None if data is None else NamedData(data, reading)


prefer = click.option(
    "--prefer",
    type=click.Choice(["speed", "balanced", "accuracy"]),
    help="Ops on integers: all that gain time, those worth their noise, or none; default: the recipe's.",
)

progress = click.option("--progress", is_flag=True, help="Show progress even if stderr is no terminal.")


def derived(cls: Any, *others: str, **texts: str) -> Callable[..., Any]:
    """Derives options from the fields of a dataclass; the command gets them as the dict ``fields``.

    Args:
        cls: the dataclass. Fields that other decorators have declared are in the dict, too.
        *others: other options that belong in the dict.
        **texts: field -> its help; a switch that is on becomes ``--no-FIELD``, a number is 0 or more.
    """
    known = {field.name: field for field in dataclasses.fields(cls)}
    added = _all(*(_option_of(known[name], text) for name, text in texts.items()))
    return lambda function: added(grouped("fields", *known, *others)(function))


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
            type=click.FloatRange(0),
            default=60.0,
            show_default=True,
            help="Seconds between checkpoints.",
        ),
        grouped("collecting", "engine", "threads", "workers", "ray", "every", "seconds", "runtime_host"),
    )(function)

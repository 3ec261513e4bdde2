"""The commands that make a graph of a network and count it: ``qtrace trace``, ``import`` and ``inspect``."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import click

from qtrace.cli import models, options
from qtrace.cli.console import Console
from qtrace.cli.models import CONVERTED, images, note_ends
from qtrace.cli.reports import on_terminal

if TYPE_CHECKING:
    from qtrace.graph.differences import SamplesReport

__all__ = ["import_onnx", "inspect", "trace"]


@options.command(example="qtrace trace models:resnet18 --shape 1x3x224x224 -o resnet18.mge")
@click.argument("factory", metavar="PKG.MOD:FACTORY")
@options.example
@click.option(
    "--data", "-d", metavar="D", help="Trace on the first batch of this data instead; see calibrate."
)
@images()
@options.recipe()
@options.file_to_write("--out", "-o", required=True, help="The file to write.")
@options.grouped("tracing", "method", "check", "allow_branch")
@click.option(
    "--method",
    metavar="NAME",
    default="forward",
    show_default=True,
    help="Trace this method, such as one that stops before boxes are decoded.",
)
@click.option(
    "--no-check",
    "check",
    flag_value=False,
    default=True,
    is_flag=True,
    help="Do not compare the trace with the module on other inputs.",
)
@click.option(
    "--allow-branch",
    "allow_branch",
    metavar="FILE:LINE",
    multiple=True,
    help="On this line of forward, fix the data's value as in the example. Repeatable.",
)
@options.output
def trace(
    factory: str,
    shapes: models.Shapes,
    data: str | None,
    recipe: models.NamedRecipe,
    out: options.FileToWrite,
    tracing: dict[str, Any],
    console: Console,
) -> None:
    """Trace a module into a file.

    FACTORY is called without arguments and returns a Module with its weights loaded. It is imported from the
    current directory or PYTHONPATH. --recipe is needed only for its preprocess, with a folder of images.
    """
    if bool(shapes) == (data is not None):
        raise click.UsageError("give either --shape or --data.")
    with console.work():
        import qtrace

        qconfig, source = recipe.load(), None
        if data is not None:
            first = models.NamedData(data, {"batch_size": 1, "max_batches": 1})
            source = first.open(console, qconfig)
        with out.open() as partial:
            traced = models.trace_factory(factory, shapes=shapes, data=source, **tracing)
            qtrace.save(traced, partial)
        ends = note_ends(traced, out.path, console)
    console.result(str(out.path), {"model": str(out.path), **ends})


@options.command("import", example="qtrace import recogniser.onnx --shape x=1x3x48x320 -o recogniser.mge")
@click.argument("network", metavar="FILE.onnx")
@options.input_shapes
@click.option(
    "--batch",
    metavar="INPUT:AXIS",
    default="auto",
    show_default=True,
    help="The axis whose size stays free, such as x:0; `none` fixes every axis. By default the first axis of "
    "the first input, if the file leaves it open.",
)
@click.option("--fixed", is_flag=True, help="Fix every axis but the batch at the size in --shape.")
@click.option(
    "--outputs",
    metavar="TENSOR",
    multiple=True,
    help="Make this tensor an output; what no output needs is left out. Repeatable.",
)
@options.file_to_write("--out", "-o", required=True, help="The file to write.")
@options.output
def import_onnx(
    network: str,
    shapes: dict[str, tuple[int, ...]],
    batch: str,
    fixed: bool,
    outputs: tuple[str, ...],
    out: options.FileToWrite,
    console: Console,
) -> None:
    """Make a traced model of an ONNX file.

    Layers with stored weights become modules named as in the file, so that they can be trained and named in
    recipes. A node without an equal in MegEngine is kept as in the file, and runs in onnxruntime. Axes that
    the file leaves open stay open as far as its nodes allow, which is checked at other sizes; --shape gives
    the sizes of the trace.
    """
    with console.work():
        import qtrace

        with out.open() as partial:
            free = None if batch == "none" else batch
            traced = qtrace.from_onnx(network, shapes, batch=free, fixed=fixed, outputs=outputs or None)
            qtrace.save(traced, partial)
        ends = note_ends(traced, out.path, console)
    console.result(str(out.path), {"model": str(out.path), **ends})


_SAMPLES = 4  # of a batch


@options.command(
    example="""
        qtrace inspect float.mge
        qtrace inspect detector.onnx --time 10 --json
        qtrace inspect models:resnet18 --shape 1x3x224x224 --dot graph.dot
        qtrace inspect float.mge --samples images.npy
    """,
)
@click.argument("model")
@options.example
@click.option(
    "--time",
    "runs",
    type=click.IntRange(1, 10_000),
    metavar="N",
    help="Also run the model N times in MegEngine, op by op, and show the median time of each.",
)
@options.file_to_write("--dot", help="Also draw the graph into this file, for Graphviz.")
@click.option(
    "--samples",
    metavar="D",
    help="Also compare a batch of four samples of these data with each sample alone: .npy, .npz, a folder "
    "of images or pkg.mod:loader.",
)
@options.allow
@options.output
def inspect(
    model: models.NamedModel,
    shapes: models.Shapes,
    runs: int | None,
    dot: options.FileToWrite | None,
    samples: str | None,
    console: Console,
) -> int:
    """Show what each op costs: multiply-accumulates, parameters, memory, time.

    MODEL is a file that qtrace wrote (traced, prepared or quantized), a folder of `qtrace calibrate`, an ONNX
    file, or pkg.mod:factory with --shape. Memory is for the activations at the traced shapes: of each
    result, and of all that exist while an op runs. On a terminal the table is cut to its width; a pipe gets
    all of it. With --samples, the exit code is 1 if the model computes a sample otherwise in a batch than
    alone, and the first op that does is named.
    """
    model = model.in_folder(CONVERTED)
    width = shutil.get_terminal_size().columns if on_terminal() else None
    with console.work():
        from qtrace.graph.flatten import flatten
        from qtrace.graph.views import dot as draw
        from qtrace.inspection.analysis import analyze

        loaded = model.load_or_trace(shapes)
        analysis = analyze(loaded, runs or 0)
        if dot is not None:
            dot.write_graph(draw(flatten(loaded)), console)
        report = None if samples is None else _compare_samples(loaded, samples, console)
    text, result = analysis.table(width), {"model": model.name, **analysis.to_dict()}
    if report is not None:
        text, result = f"{text}\n{report}", {**result, "samples": report.to_dict()}
    console.result(text, result)
    return 0 if report is None or report.passed else 1


def _compare_samples(model: Any, data: str, console: Console) -> SamplesReport:
    """Compares the first batch of ``data`` with its samples one by one."""
    from qtrace.data.batches import as_arguments
    from qtrace.graph.differences import check_samples

    first = models.NamedData(data, {"batch_size": _SAMPLES, "max_batches": 1})
    source = first.open(console, models.preprocessing(model))
    args, kwargs = as_arguments(next(iter(source)), model)
    return check_samples(model, *args, **kwargs)

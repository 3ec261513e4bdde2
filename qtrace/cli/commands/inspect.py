"""The command ``qtrace inspect``."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qtrace.cli import help, models, options, targets
from qtrace.cli.commands.explain import on_terminal
from qtrace.cli.console import Console
from qtrace.cli.naming import CONVERTED
from qtrace.storage.outputs import output_file

if TYPE_CHECKING:
    from qtrace.graph.differences import SamplesReport

__all__ = ["inspect"]

_SAMPLES = 4  # of a batch


@click.command(
    cls=help.Command,
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
@targets.file_to_write("--dot", help="Also draw the graph into this file, for Graphviz.")
@click.option(
    "--samples",
    metavar="D",
    help="Also compare a batch of four samples of these data with each sample alone: .npy, .npz, a folder "
    "of images or pkg.mod:loader.",
)
@options.allow
@options.output
def inspect(
    model: str,
    shapes: models.Shapes,
    runs: int | None,
    dot: Path | None,
    force: bool,
    samples: str | None,
    allow: tuple[str, ...],
    console: Console,
) -> int:
    """Show what each op costs: multiply-accumulates, parameters, memory, time.

    MODEL is a file that qtrace wrote (traced, prepared or quantized), a folder of `qtrace calibrate`, an ONNX
    file, or pkg.mod:factory with --shape. Memory is for the activations at the traced shapes: of each
    result, and of all that exist while an op runs. On a terminal the table is cut to its width; a pipe gets
    all of it. With --samples, the exit code is 1 if the model computes a sample otherwise in a batch than
    alone, and the first op that does is named.
    """
    model = models.model_file(model, CONVERTED)
    width = shutil.get_terminal_size().columns if on_terminal() else None
    with console.work():
        from qtrace.graph.flatten import flatten
        from qtrace.graph.views import dot as draw
        from qtrace.inspection.analysis import analyze

        if models.is_factory(model):
            loaded = models.trace_factory(model, shapes=shapes)
        else:
            loaded = models.load_model(model, allow)
        analysis = analyze(loaded, runs or 0)
        if dot is not None:
            with output_file(dot, force=force) as partial:
                partial.write_text(draw(flatten(loaded)), encoding="utf-8")
            console.note(f"{dot} is written; `dot -Tsvg {dot} -o graph.svg` draws it.")
        report = None if samples is None else _compare_samples(loaded, samples, console)
    text, result = analysis.table(width), {"model": model, **analysis.to_dict()}
    if report is not None:
        text, result = f"{text}\n{report}", {**result, "samples": report.to_dict()}
    console.result(text, result)
    return 0 if report is None or report.passed else 1


def _compare_samples(model: Any, data: str, console: Console) -> SamplesReport:
    """Compares the first batch of ``data`` with its samples one by one."""
    from qtrace.data.batches import as_arguments
    from qtrace.graph.differences import check_samples

    source = models.open_source(
        data,
        console,
        qconfig=models.preprocessing(model, None),
        batch_size=_SAMPLES,
        max_batches=1,
        skip_bad=False,
    )
    args, kwargs = as_arguments(next(iter(source)), model)
    return check_samples(model, *args, **kwargs)

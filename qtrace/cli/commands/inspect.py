"""The command ``qtrace inspect``."""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from qtrace.cli import help, models, options
from qtrace.cli.commands.explain import on_terminal
from qtrace.cli.console import Console
from qtrace.cli.outputs import output_file

__all__ = ["inspect"]


@click.command(
    cls=help.Command,
    example="""
        qtrace inspect float.mge
        qtrace inspect detector.onnx --time 10 --json
        qtrace inspect models:resnet18 --shape 1x3x224x224 --dot graph.dot
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
@click.option(
    "--dot", type=options.file_or_folder(), help="Also draw the graph into this file, for Graphviz."
)
@options.allow
@options.output
def inspect(
    model: str,
    shapes: models.Shapes,
    runs: int | None,
    dot: Path | None,
    allow: tuple[str, ...],
    console: Console,
) -> None:
    """Show what each op costs: multiply-accumulates, parameters, memory, time.

    MODEL is a file that qtrace wrote (traced, prepared or quantized), an ONNX file, or pkg.mod:factory with
    --shape. Memory is that of the activations at the traced shapes: of each result, and of all that exist
    while an op runs. On a terminal the table is cut to its width; a pipe gets all of it.
    """
    width = shutil.get_terminal_size().columns if on_terminal() else None
    with console.work():
        from qtrace.graph.dot import dot as draw
        from qtrace.graph.flatten import flatten
        from qtrace.inspection.analysis import analyze

        if models.is_factory(model):
            loaded = models.trace_factory(model, shapes=shapes)
        else:
            loaded = models.load_model(model, allow)
        analysis = analyze(loaded, runs or 0)
        if dot is not None:
            with output_file(dot) as partial:
                partial.write_text(draw(flatten(loaded)), encoding="utf-8")
            console.note(f"{dot} is written; `dot -Tsvg {dot} -o graph.svg` draws it.")
    console.result(analysis.table(width), {"model": model, **analysis.to_dict()})

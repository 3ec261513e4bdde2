"""The command ``qtrace explain``."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import click

from qtrace.cli import help, models, options, targets
from qtrace.cli.console import Console
from qtrace.cli.naming import PREPARED
from qtrace.storage.outputs import output_file

__all__ = ["explain"]


@click.command(
    cls=help.Command,
    example="""
        qtrace explain resnet18.mge --recipe resnet50
        qtrace explain int8/prepared.mge --why layer1.0.conv1
        qtrace explain int8/prepared.mge --dot graph.dot && dot -Tsvg graph.dot -o graph.svg
    """,
)
@click.argument("model")
@options.recipe()
@options.example
@click.option(
    "--why",
    metavar="NODE",
    help="Explain a node, also as in the ONNX file, a site, a module (or a glob), or a kind of op in full.",
)
@click.option("--all", "every", is_flag=True, help="Show ops on shapes and constants, too.")
@targets.file_to_write("--dot", help="Also draw the graph into this file, for Graphviz.")
@options.allow
@options.output
def explain(
    model: str,
    recipe: str | None,
    allow_code: bool,
    shapes: models.Shapes,
    why: str | None,
    every: bool,
    dot: Path | None,
    force: bool,
    allow: tuple[str, ...],
    console: Console,
) -> None:
    """Show for every op what is quantized, by which rule, or why it stays float.

    MODEL is a traced file (what the recipe would do), a prepared or quantized one or the folder of `qtrace
    calibrate` (what was done), or pkg.mod:factory with --shape.

    Below the table are the share that is computed on integers and, for everything that stays float, the line
    of a recipe that would change it. On a terminal the table is cut to its width; a pipe gets all of it.
    """
    model = models.model_file(model, PREPARED)
    width = shutil.get_terminal_size().columns if on_terminal() else None
    with console.work():
        import qtrace
        from qtrace.preparation.figures import describe_precision
        from qtrace.preparation.model import is_quantized

        if recipe:
            qtrace.load_recipe(recipe, allow_code=allow_code)  # its mistakes are reported before tracing
        if models.is_factory(model):
            loaded = models.trace_factory(model, shapes=shapes)
        else:
            loaded = models.load_model(model, allow)
        if recipe and is_quantized(loaded):
            console.note(
                f"{model} is quantized already: this is its own quantization, and --recipe is ignored."
            )
        explanation = qtrace.explain(loaded, recipe, allow_code=allow_code)
        text, data = _result(explanation, why, every, width)
        if dot is not None:
            with output_file(dot, force=force) as partial:
                partial.write_text(explanation.dot(every=every), encoding="utf-8")
            console.note(f"{dot} is written; `dot -Tsvg {dot} -o graph.svg` draws it.")
    console.note(describe_precision(explanation.annotation))
    console.result(text, data)


def on_terminal() -> bool:
    """Whether the result goes to a terminal."""
    return sys.stdout.isatty()


def _result(explanation: Any, why: str | None, every: bool, width: int | None) -> tuple[str, Any]:
    """Returns the result as text and as data."""
    if why is not None:
        stories = explanation.why(why)
        return "\n\n".join(s.text(width or 100) for s in stories), [s.to_dict() for s in stories]
    colour = width is not None and "NO_COLOR" not in os.environ
    return explanation.table(width, every=every, colour=colour), explanation.to_dict()

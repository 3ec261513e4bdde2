"""The command ``qtrace diff``."""

from __future__ import annotations

import shutil

import click

from qtrace.cli import options
from qtrace.cli.console import Console
from qtrace.cli.models import check_model, import_classes
from qtrace.cli.reports import on_terminal
from qtrace.errors import SHOWN_LINES


@click.command(
    cls=options.Command,
    example="""
        qtrace diff monday/ tuesday/
        qtrace diff int8/quantized.mge finetuned/quantized.mge --json
        qtrace diff resnet50 mine.yaml --exit-code
        qtrace diff net.onnx net-int8.onnx
    """,
)
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option("--all", "every", is_flag=True, help=f"Show all rows of each table, not {SHOWN_LINES}.")
@click.option("--exit-code", "strict", is_flag=True, help="Exit with 1 if A and B differ.")
@options.allowed_classes
@options.allow_code
@options.output
def diff(
    a: str, b: str, every: bool, strict: bool, allow: tuple[str, ...], allow_code: bool, console: Console
) -> int:
    """Show what differs between two outputs, models, recipes or ONNX files.

    A and B are two recipes, by name or file, or two .onnx files, which are compared node by node. Else each
    is a folder of `qtrace calibrate` or `qtrace finetune`, a prepared.mge or a quantized.mge. Two models are
    compared by config, ops, sites, scales, integers of weights and biases, and figures: size, MACs, predicted
    time, and the verdict figures of folders. Sites are paired by name. Nodes of .onnx files are paired by
    name or result; the table says which went, which came, and what the others read and run on.
    """
    width = shutil.get_terminal_size().columns if on_terminal() else None
    with console.work():
        from qtrace.extras.diff.models import diff as compare

        for name in (a, b):
            check_model(name)
        import_classes(allow)
        result = compare(a, b, allow=allow, allow_code=allow_code)
    text = f"A: {a}\nB: {b}\n\n{result.table(width, None if every else SHOWN_LINES)}"
    console.result(text, {"a": a, "b": b, **result.to_dict()})
    return int(strict and not result.empty)

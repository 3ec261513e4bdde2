"""The command ``qtrace export``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from qtrace.cli import help, models, options
from qtrace.cli.console import Console
from qtrace.cli.outputs import output_file

__all__ = ["export"]


def _pairs(_: click.Context, __: click.Parameter, pairs: tuple[str, ...]) -> dict[str, Any]:
    """Parses ``NAME=VALUE`` pairs to a dict; values are read as in a recipe: ``true``, ``8``, text."""
    values: dict[str, Any] = {}
    for pair in pairs:
        name, sign, text = pair.partition("=")
        if not name or not sign:
            raise click.BadParameter(f"{pair!r} is not of the form NAME=VALUE, such as packed=true.")
        values[name.replace("-", "_")] = _value(pair, text)
    return values


def _value(pair: str, text: str) -> Any:
    """Parses the value ``text`` of ``pair``."""
    from qtrace.config.tree import read

    problems = [] if text.strip() else [": it is empty: write null, or quotes for empty text."]
    tree = None if problems else read(text, "value", problems)
    if tree is None or problems:
        reason = problems[0].partition(": ")[2]  # without the place, which is always line 1
        raise click.BadParameter(f"the value of {pair!r} cannot be read as YAML: {reason}")
    return tree.plain()


@click.command(
    cls=help.Command,
    example="""
    qtrace export resnet18-int8/quantized.mge -o resnet18.onnx
    qtrace export resnet18-int8/quantized.mge -o resnet18.onnx -f onnx_float -O params=aimet-2.0.0
    """,
)
@click.argument("quantized")
@click.option(
    "--out", "-o", type=options.file_or_folder(), required=True, help="The file to write, or replace."
)
@click.option("--format", "-f", "file_format", metavar="F", help="The format, if the suffix does not say it.")
@click.option(
    "--option",
    "-O",
    "settings",
    metavar="NAME=VALUE",
    multiple=True,
    callback=_pairs,
    help="An option of the format, such as packed=true for .onnx or io=int8 for .tflite. Repeatable.",
)
@click.option(
    "--allow-float",
    metavar="OP",
    multiple=True,
    help="Keep this kind of op in float where the format cannot express it on integers. Repeatable.",
)
@options.allow
@options.output
def export(
    quantized: str,
    out: Path,
    file_format: str | None,
    settings: dict[str, Any],
    allow_float: tuple[str, ...],
    allow: tuple[str, ...],
    console: Console,
) -> None:
    """Write a quantized model for a runtime.

    QUANTIZED is the quantized.mge of `qtrace calibrate`. A format of several files puts the others beside
    --out.
    """
    with console.work():
        import qtrace

        model = models.load_model(quantized, allow)
        if allow_float:
            settings = {**settings, "allow_float": allow_float}
        with output_file(out) as partial:
            qtrace.export(model, str(partial), format=file_format, **settings)
    console.result(str(out), {"file": str(out)})

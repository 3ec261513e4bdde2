"""``qtrace export``."""

from __future__ import annotations

from pathlib import Path

import click

from qtrace.cli import help, models, options
from qtrace.cli.console import Console
from qtrace.cli.outputs import output_file

__all__ = ["export"]


@click.command(
    cls=help.Command,
    example="qtrace export resnet18-int8/quantized.mge -o resnet18.onnx",
)
@click.argument("quantized")
@click.option(
    "--out", "-o", type=options.file_or_folder(), required=True, help="The file to write, or replace."
)
@click.option("--format", "-f", "file_format", metavar="F", help="The format, if the suffix does not tell.")
@options.allow
@options.output
def export(
    quantized: str, out: Path, file_format: str | None, allow: tuple[str, ...], console: Console
) -> None:
    """Write a quantized model for a runtime.

    QUANTIZED is the quantized.mge of `qtrace calibrate`.
    """
    with console.work():
        import qtrace

        model = models.load_model(quantized, allow)
        with output_file(out) as partial:
            qtrace.export(model, str(partial), format=file_format)
    console.result(str(out), {"file": str(out)})

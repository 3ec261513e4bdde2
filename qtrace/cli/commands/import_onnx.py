"""The command ``qtrace import``."""

from __future__ import annotations

from pathlib import Path

import click

from qtrace.cli import help, options, targets
from qtrace.cli.console import Console
from qtrace.cli.naming import note_ends
from qtrace.storage.outputs import output_file

__all__ = ["import_onnx"]


@click.command(
    "import",
    cls=help.Command,
    example="qtrace import recogniser.onnx --shape x=1x3x48x320 -o recogniser.mge",
)
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
    help="Cut the file at this tensor: it is an output, and what it does not need is left out. Repeatable.",
)
@targets.file_to_write("--out", "-o", required=True, help="The file to write.")
@options.output
def import_onnx(
    network: str,
    shapes: dict[str, tuple[int, ...]],
    batch: str,
    fixed: bool,
    outputs: tuple[str, ...],
    out: Path,
    force: bool,
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

        with output_file(out, force=force) as partial:
            free = None if batch == "none" else batch
            traced = qtrace.from_onnx(network, shapes, batch=free, fixed=fixed, outputs=outputs or None)
            qtrace.save(traced, partial)
        ends = note_ends(traced, out, console)
    console.result(str(out), {"model": str(out), **ends})

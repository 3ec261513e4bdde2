"""The command ``qtrace trace``."""

from __future__ import annotations

from pathlib import Path

import click

from qtrace.cli import help, models, options, targets
from qtrace.cli.console import Console
from qtrace.cli.images import change_config, images
from qtrace.cli.naming import note_ends
from qtrace.storage.outputs import output_file

__all__ = ["trace"]


@click.command(
    cls=help.Command,
    example="qtrace trace models:resnet18 --shape 1x3x224x224 -o resnet18.mge",
)
@click.argument("factory", metavar="PKG.MOD:FACTORY")
@options.example
@click.option(
    "--data", "-d", metavar="D", help="Trace on the first batch of this data instead; see calibrate."
)
@images()
@options.recipe()
@targets.file_to_write("--out", "-o", required=True, help="The file to write.")
@click.option(
    "--method",
    metavar="NAME",
    default="forward",
    show_default=True,
    help="Trace this method, such as one that stops before boxes are decoded.",
)
@click.option("--no-check", is_flag=True, help="Do not compare the trace with the module on other inputs.")
@click.option(
    "--allow-branch",
    "branches",
    metavar="FILE:LINE",
    multiple=True,
    help="Keep what a value of the data is for the example on this line of forward; several times for more.",
)
@options.output
def trace(
    factory: str,
    shapes: models.Shapes,
    data: str | None,
    recipe: str | None,
    allow_code: bool,
    out: Path,
    force: bool,
    method: str,
    no_check: bool,
    branches: tuple[str, ...],
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

        qconfig = models.load_recipe(recipe, allow_code) if recipe else change_config(None)
        source = None
        if data is not None:
            source = models.open_source(
                data, console, qconfig=qconfig, batch_size=1, max_batches=1, skip_bad=False
            )
        with output_file(out, force=force) as partial:
            traced = models.trace_factory(
                factory,
                shapes=shapes,
                data=source,
                method=method,
                check=not no_check,
                allow_branch=branches,
            )
            qtrace.save(traced, partial)
        ends = note_ends(traced, out, console)
    console.result(str(out), {"model": str(out), **ends})

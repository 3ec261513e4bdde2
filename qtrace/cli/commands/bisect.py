"""``qtrace bisect``."""

from __future__ import annotations

import click

from qtrace.cli import help, models, options
from qtrace.cli.console import Console

__all__ = ["bisect"]


@click.command(
    cls=help.Command,
    example="qtrace bisect resnet18.onnx --model int8/quantized.mge --data images/ --recipe resnet50",
)
@click.argument("file")
@click.option(
    "--model", "-m", metavar="QUANTIZED", required=True, help="The quantized.mge it was exported from."
)
@click.option(
    "--runtime",
    metavar="NAME",
    help="The runtime, such as openvino for an .onnx; by default the one that the file is meant for.",
)
@click.option(
    "--max-lsb", metavar="N", default=1, show_default=True, help="Differences up to this are no finding."
)
@options.data(required=True)
@options.recipe()
@options.allow
@options.progress
@options.output
def bisect(
    file: str,
    model: str,
    runtime: str | None,
    max_lsb: int,
    data: str,
    batch_size: int,
    max_batches: int | None,
    skip_bad: bool,
    recipe: str | None,
    allow_code: bool,
    allow: tuple[str, ...],
    console: Console,
) -> int:
    """Find the first op whose integers differ from the runtime's, and say what the difference looks like.

    The exit code is 1 if there is one. Images and raw pixels are prepared as MODEL's recipe says, or as
    --recipe does.
    """
    with console.work():
        import qtrace

        loaded = models.load_model(model, allow)
        models.check_stage(loaded, model, "converted")
        qconfig = models.preprocessing(loaded, recipe, allow_code)
        models.check_size(loaded, model, qconfig, data)
        source = models.open_source(
            data, console, qconfig=qconfig, batch_size=batch_size, max_batches=max_batches, skip_bad=skip_bad
        )
        with console.bar(source, "bisect") as batches:
            found = qtrace.bisect(file, loaded, batches, runtime=runtime, max_lsb=max_lsb)
        text = (
            f"no site differs by more than {max_lsb} LSB, and no output" if found is None else found.table()
        )
    models.tell_skipped(source, console)
    console.result(text, {"found": None if found is None else found.to_dict()})
    return 0 if found is None else 1

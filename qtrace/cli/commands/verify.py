"""The command ``qtrace verify``."""

from __future__ import annotations

import click

from qtrace.cli import help, models, options
from qtrace.cli.console import Console

__all__ = ["verify"]


@click.command(
    cls=help.Command,
    example="qtrace verify resnet18.onnx --model int8/quantized.mge --data images/ --recipe resnet50",
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
@options.data(required=True)
@options.recipe()
@options.allow
@options.progress
@options.output
def verify(
    file: str,
    model: str,
    runtime: str | None,
    data: str,
    batch_size: int,
    max_batches: int | None,
    skip_bad: bool,
    recipe: str | None,
    allow_code: bool,
    allow: tuple[str, ...],
    console: Console,
) -> int:
    """Run an exported file in its runtime beside the quantized graph, and compare every site.

    The exit code is 1 if they differ. Images and raw pixels are preprocessed by --recipe, or
    else by MODEL's own recipe.
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
        with console.bar(source, "verify") as batches:
            report = qtrace.verify(file, loaded, batches, runtime=runtime)
        text, result = report.table(), report.to_dict()
    models.note_skipped(source, console)
    console.result(text, {"passed": bool(report.passed), **result})
    return 0 if report.passed else 1

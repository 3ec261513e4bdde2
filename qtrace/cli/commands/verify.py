"""The command ``qtrace verify``."""

from __future__ import annotations

import click

from qtrace.cli import dumps as dumped_tensors
from qtrace.cli import help, models, options
from qtrace.cli.console import Console

__all__ = ["verify"]


@click.command(
    cls=help.Command,
    example="qtrace verify resnet18.onnx --model int8/quantized.mge --data images/ --recipe resnet50",
)
@click.argument("file")
@click.option("--model", "-m", metavar="MODEL", required=True, help="The file it was exported from.")
@click.option(
    "--runtime",
    metavar="NAME",
    callback=options.importable,
    help="The runtime, such as openvino for an .onnx, or pkg.mod:NAME of your own; by default the one that "
    "the file is meant for.",
)
@dumped_tensors.options
@options.data(required=True)
@options.recipe()
@click.option(
    "--float",
    "float_model",
    metavar="MODEL",
    help="The float network, if `ptq` algorithms or training changed the weights.",
)
@options.allow
@options.progress
@options.output
def verify(
    file: str,
    model: str,
    runtime: str | None,
    dumps: dumped_tensors.Dumps | None,
    data: str,
    batch_size: int,
    max_batches: int | None,
    skip_bad: bool,
    recipe: str | None,
    float_model: str | None,
    allow_code: bool,
    allow: tuple[str, ...],
    console: Console,
) -> int:
    """Run an exported file in its runtime beside the graph, and compare every site.

    The exit code is 1 if an op differs, or if the file's outputs are farther from float than the graph's.
    MODEL is a quantized.mge, or for a float file the float.mge of `qtrace trace`: then the outputs are
    compared. Images and raw pixels are preprocessed by --recipe, or else by MODEL's own recipe. With
    --dumped, FILE is not run: the tensors of a device are compared, batch by batch.
    """
    with console.work():
        import qtrace
        from qtrace.preparation.record import is_quantized

        loaded = models.load_model(model, allow)
        if is_quantized(loaded):
            models.check_stage(loaded, model, "converted")
        network = models.load_float(float_model, allow, loaded)
        qconfig = models.preprocessing(loaded, recipe, allow_code)
        models.check_size(loaded, model, qconfig, data)
        source = models.open_source(
            data, console, qconfig=qconfig, batch_size=batch_size, max_batches=max_batches, skip_bad=skip_bad
        )
        with console.bar(source, "verify") as batches:
            report = qtrace.verify(
                file,
                loaded,
                batches,
                float_model=network,
                runtime=runtime if dumps is None else dumps.runtime(loaded),
            )
        text, result = report.table(), report.to_dict()
    models.note_skipped(source, console)
    console.result(text, {"passed": bool(report.passed), **result})
    return 0 if report.passed else 1

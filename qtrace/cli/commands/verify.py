"""The command ``qtrace verify``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from qtrace.cli import help, hosts, models, options
from qtrace.cli import hosts as dumped_tensors
from qtrace.cli.console import Console
from qtrace.cli.naming import CONVERTED, check_exported
from qtrace.cli.verdicts import FAKE_QUANTS, SampleCounter, samples_of
from qtrace.runtimes.host import RuntimeHost

__all__ = ["verify"]


@click.command(
    cls=help.Command,
    example="qtrace verify resnet18.onnx --model int8/quantized.mge --data images/ --recipe resnet50",
)
@click.argument("file")
@click.option("--model", "-m", metavar="MODEL", required=True, help="The folder or file of FILE.")
@click.option(
    "--runtime",
    metavar="NAME",
    callback=options.importable,
    help="The runtime, such as openvino for an .onnx, or pkg.mod:NAME of your own; by default the one that "
    "the file is meant for.",
)
@hosts.runtime_host
@dumped_tensors.options
@options.data(required=True, reserved=("layout",))
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
    runtime_host: RuntimeHost | None,
    dumps: dumped_tensors.Dumps | None,
    data: str,
    reading: dict[str, Any],
    recipe: str | None,
    float_model: str | None,
    allow_code: bool,
    allow: tuple[str, ...],
    console: Console,
) -> int:
    """Run an exported file in its runtime next to the graph, and compare every site.

    The exit code is 1 if an op differs, if the file's outputs are farther from float than the graph's, or if
    the graph itself has lost columns of an output.
    MODEL is a folder of `qtrace calibrate` or its quantized.mge, or for a float file the float.mge of `qtrace
    trace`: then the outputs are compared. Images and raw pixels are preprocessed by --recipe, or else by
    MODEL's own recipe. With --dumped, FILE is not run: the tensors of a device are compared, batch by batch.
    """
    if Path(file).is_dir():
        check_exported(Path(file))
    model = models.model_file(model, CONVERTED)
    with console.work():
        import qtrace
        from qtrace.preparation.model import is_quantized

        loaded = models.load_model(model, allow)
        if is_quantized(loaded):
            models.check_stage(loaded, model, "converted")
        network = models.load_float(float_model, allow, loaded)
        qconfig = models.preprocessing(loaded, recipe, allow_code)
        models.check_size(loaded, model, qconfig, data)
        source = models.open_source(data, console, qconfig=qconfig, **reading)
        with console.bar(source, "verify") as batches:
            counter = SampleCounter(batches)
            report = qtrace.verify(
                file,
                loaded,
                counter,
                float_model=network,
                runtime=runtime if dumps is None else dumps.runtime(loaded),
                runtime_host=runtime_host,
            )
        text, result = report.table(), report.to_dict()
    measured = samples_of(counter.samples, "--data", reading["max_batches"])
    if is_quantized(loaded):
        measured += f" (graph: {FAKE_QUANTS}; the others: the runtime's outputs)"
    data_of = {"passed": bool(report.passed), "measured_on": measured, **result}
    console.result(f"{text}\nmeasured on {measured}", data_of)
    return 0 if report.passed and not result.get("lost_groups") else 1

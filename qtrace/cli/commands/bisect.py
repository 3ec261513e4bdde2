"""The command ``qtrace bisect``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from qtrace.cli import help, hosts, models, options
from qtrace.cli import hosts as dumped_tensors
from qtrace.cli.console import Console
from qtrace.cli.naming import CONVERTED, check_exported
from qtrace.runtimes.host import RuntimeHost

__all__ = ["bisect"]


@click.command(
    cls=help.Command,
    example="qtrace bisect resnet18.onnx --model int8/quantized.mge --data images/ --recipe resnet50",
)
@click.argument("file")
@click.option(
    "--model",
    "-m",
    metavar="QUANTIZED",
    required=True,
    help="The folder or quantized.mge of FILE.",
)
@click.option(
    "--runtime",
    metavar="NAME",
    callback=options.importable,
    help="The runtime, such as openvino for an .onnx, or pkg.mod:NAME of your own; by default the one that "
    "the file is meant for.",
)
@click.option("--max-lsb", metavar="N", default=1, show_default=True, help="Ignore differences up to this.")
@hosts.runtime_host
@dumped_tensors.options
@options.data(required=True, reserved=("layout",))
@options.recipe()
@options.allow
@options.progress
@options.output
def bisect(
    file: str,
    model: str,
    runtime: str | None,
    runtime_host: RuntimeHost | None,
    dumps: dumped_tensors.Dumps | None,
    max_lsb: int,
    data: str,
    reading: dict[str, Any],
    recipe: str | None,
    allow_code: bool,
    allow: tuple[str, ...],
    console: Console,
) -> int:
    """Find the first op whose integers differ from the runtime's, and show the difference.

    The exit code is 1 if there is such an op. Images and raw pixels are preprocessed by --recipe, or
    else by MODEL's own recipe. With --dumped, FILE is not run: the tensors of a device are compared.
    """
    if Path(file).is_dir():
        check_exported(Path(file))
    model = models.model_file(model, CONVERTED)
    with console.work():
        import qtrace

        loaded = models.load_model(model, allow)
        models.check_stage(loaded, model, "converted")
        qconfig = models.preprocessing(loaded, recipe, allow_code)
        models.check_size(loaded, model, qconfig, data)
        source = models.open_source(data, console, qconfig=qconfig, **reading)
        with console.bar(source, "bisect") as batches:
            difference = qtrace.bisect(
                file,
                loaded,
                batches,
                runtime=runtime if dumps is None else dumps.runtime(loaded),
                runtime_host=runtime_host,
                max_lsb=max_lsb,
            )
        text = (
            f"no site differs by more than {max_lsb} LSB, and no output"
            if difference is None
            else difference.table()
        )
    console.result(text, {"found": None if difference is None else difference.to_dict()})
    return 0 if difference is None else 1

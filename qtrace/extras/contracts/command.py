"""The command ``qtrace check``."""

from __future__ import annotations

from pathlib import Path

import click

from qtrace.cli import options
from qtrace.cli.console import Console
from qtrace.cli.models import check_exported
from qtrace.runtimes.host import RuntimeHost


@click.command(
    cls=options.Command,
    example="""
    qtrace check model.onnx --target tensorrt
    qtrace check model.onnx --target qnn --fix -o model-qnn.onnx
    """,
)
@click.argument("file", type=options.file_or_folder())
@click.option(
    "--target",
    "-t",
    metavar="NAME",
    required=True,
    help="The target: onnxruntime, qnn, ryzenai, ryzenai_xint8 or tensorrt.",
)
@options.runtime_host
@click.option("--fix", is_flag=True, help="Write a copy to -o in which all that is mechanical is repaired.")
@options.file_to_write("--out", "-o", help="With --fix: the file to write.")
@options.output
def check(
    file: Path,
    target: str,
    runtime_host: RuntimeHost | None,
    fix: bool,
    out: options.FileToWrite | None,
    console: Console,
) -> int:
    """Check whether a quantized ONNX file keeps the contract of a target.

    FILE has QuantizeLinear and DequantizeLinear nodes, and may be of any tool. The command names each node
    that breaks a rule, the rule with its source and the cure, and the ops that will compute in float. The
    exit code is 1 if a rule is broken. Nothing is run on the target's device.
    """
    if fix != (out is not None):
        raise click.UsageError("--fix and -o belong together: give both, or none.")
    check_exported(file)
    with console.work():
        from qtrace.extras.contracts import check_file_for

        path, force = (None, False) if out is None else (out.path, out.force)
        report = check_file_for(file, target, out=path, force=force, runtime_host=runtime_host)
    console.result(report.text(), report.to_dict())
    return 0 if report.passed else 1

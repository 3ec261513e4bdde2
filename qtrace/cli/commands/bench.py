"""The command ``qtrace bench``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qtrace.cli import help, hosts, options
from qtrace.cli.console import Console
from qtrace.cli.naming import check_exported
from qtrace.cli.verdicts import check_file, note_checks
from qtrace.errors import ConfigError
from qtrace.runtimes.host import RuntimeHost

if TYPE_CHECKING:
    from qtrace.benchmarking.files import FileReport
    from qtrace.costs import CostTable
    from qtrace.inspection.expectations import Expectations

__all__ = ["bench"]

_PACKAGED = "packaged"


@click.command(cls=help.Command, example="qtrace bench float.onnx int8.onnx --by-op")
@click.argument("files", metavar="FILE...", nargs=-1, type=options.file_or_folder())
@click.option(
    "--runtime",
    metavar="NAME",
    help="The runtime, such as openvino for an .onnx; by default the one that the file is meant for.",
)
@hosts.runtime_host
@click.option("--threads", type=click.IntRange(1), help="Threads of the runtime; default: 1.")
@click.option(
    "--batch", type=click.IntRange(1), help="Samples of a run, if the file leaves them open; default: 1."
)
@options.input_shapes
@click.option(
    "--seconds",
    type=click.FloatRange(0, 3600),
    help="How long to run each file, in seconds; at least 9 runs are made; default: 3.",
)
@click.option(
    "--by-op", is_flag=True, help="Show which nodes the time goes to, by onnxruntime's own profile."
)
@click.option(
    "--predict",
    metavar="TABLE",
    is_flag=False,
    flag_value=_PACKAGED,
    help="Predict the times, too: by a cost table of yours, or without TABLE by the packaged one.",
)
@options.recipe()
@options.progress
@options.output
def bench(
    files: tuple[Path, ...],
    runtime: str | None,
    runtime_host: RuntimeHost | None,
    threads: int | None,
    batch: int | None,
    shapes: dict[str, tuple[int, ...]],
    seconds: float | None,
    by_op: bool,
    predict: str | None,
    recipe: str | None,
    allow_code: bool,
    console: Console,
) -> int:
    """Measure how fast exported files run on this machine.

    Several files take turns, and the speed of each is given against the first one. A file that is slower says
    what its time goes to. With --recipe, the exit code is 1 if a file after the first one, or a single file,
    is larger or slower than the recipe's `expect` allows.
    """
    if not files:
        raise click.UsageError("name the files to run.")
    for file in files:
        check_exported(file)
    with console.work():
        from qtrace.benchmarking.files import bench as measure

        config = None if recipe is None else _expecting(recipe, allow_code)
        table = None if predict is None else _table(predict)
        report = measure(
            *files,
            runtime=runtime,
            runtime_host=runtime_host,
            threads=threads or 1,
            batch=batch or 1,
            shapes=shapes,
            seconds=3.0 if seconds is None else seconds,
            by_op=by_op,
            predict=table,
            progress=console.progress,
        )
    if table is not None:
        _note_differences(table, report.threads, console)
    checks = _check(config, report.files)
    console.result(report.table(), {**report.to_dict(), **note_checks(console, *checks)})
    return 0 if all(check.passed for check in checks) else 1


def _expecting(recipe: str, allow_code: bool) -> Any:
    """Loads a recipe that has an ``expect``."""
    import qtrace

    config = qtrace.load_recipe(recipe, allow_code=allow_code)
    if config.expect is None:
        raise ConfigError(
            f"{recipe} expects nothing that could be checked: add expect with max_megabytes or "
            "max_milliseconds, or leave --recipe out."
        )
    return config


def _check(config: Any, reports: Sequence[FileReport]) -> list[Expectations]:
    """Checks the files after the first one, which the others are compared with, or a single file."""
    judged = reports[1:] or reports
    return [check_file(config, r.path.name, r.size, r.latency.median, measured=True) for r in judged]


def _table(name: str) -> CostTable:
    from qtrace.benchmarking.machine import describe_machine
    from qtrace.costs import CostTable

    if name == _PACKAGED:
        return CostTable.for_machine(describe_machine("onnxruntime", "onnxruntime", 1))
    table = CostTable.read(Path(name))
    if table.machine.runtime != "onnxruntime":
        raise ConfigError(
            f"{name} has the times of {table.machine.runtime}: files are predicted for onnxruntime only. "
            "Leave TABLE out, or give a table of onnxruntime."
        )
    return table


def _note_differences(table: CostTable, threads: int, console: Console) -> None:
    from qtrace.benchmarking.machine import describe_machine, differences

    here = describe_machine(table.machine.runtime, "onnxruntime", threads)
    if sentences := differences(table.machine, here):
        console.warn(f"the cost table was measured elsewhere: {'; '.join(sentences)}.")

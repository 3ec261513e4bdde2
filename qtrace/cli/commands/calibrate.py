"""The command ``qtrace calibrate``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qtrace.cli import help, models, options
from qtrace.cli.console import Console
from qtrace.cli.figures import note_graph
from qtrace.cli.gates import check_graph, note_checks
from qtrace.cli.outputs import resumable_folder
from qtrace.cli.verdicts import CURE, VERDICT, Judging, judging
from qtrace.errors import QtraceError

if TYPE_CHECKING:
    from qtrace.calibration.running import Result
    from qtrace.data import DataSource  # at run time it loads numpy, which --help does without

__all__ = ["FILES", "calibrate", "write_folder"]

FILES = ("prepared.mge", "quantized.mge", "report.json", "explain.txt")


@click.command(
    cls=help.Command,
    example="qtrace calibrate resnet18.mge --data images/ --recipe resnet50 --out resnet18-int8",
)
@click.argument("model")
@options.data(required=True)
@options.recipe("int8")
@click.option("--out", "-o", type=options.file_or_folder(), required=True, help="The folder to write.")
@judging
@options.collecting
@click.option(
    "--learning-engine",
    type=click.Choice(["auto", "megengine", "torch"]),
    default="auto",
    show_default=True,
    help="The engine that learns roundings (adaround, reconstruct); auto takes torch where it applies.",
)
@click.option("--resume", is_flag=True, help="Go on where an interrupted calibration stopped.")
@click.option("--force", is_flag=True, help="Replace the output folder of an earlier calibration.")
@options.allow
@options.progress
@options.output
def calibrate(
    model: str,
    data: str,
    batch_size: int,
    max_batches: int | None,
    skip_bad: bool,
    recipe: str,
    allow_code: bool,
    out: Path,
    collecting: dict[str, Any],
    learning_engine: str,
    resume: bool,
    force: bool,
    allow: tuple[str, ...],
    judged: dict[str, Any],
    console: Console,
) -> int:
    """Quantize a model with calibration data.

    MODEL is a file from `qtrace trace`, or pkg.mod:factory, which is traced on the first batch. The folder
    --out appears whole or not at all. It holds prepared.mge (to be trained further), quantized.mge (to be
    exported), report.json (scheme, scale and zero point of every site), explain.txt (why each op is quantized
    or not) and verdict.json.

    In an .npz, arrays called y, label(s) or target(s) are left out; a single other array is the first input,
    several are inputs by name. A folder of images is read with its subfolders, as the recipe's preprocess
    says.

    The end is a verdict: good, check or broken, the worst layers with the cause of each, and the command to
    run next. It is measured on --evaluation, or on batches that are held back if there are 8 or more. The
    exit code is 1 if a limit of the recipe's `expect` is broken.
    """
    judge = Judging(click.get_current_context().params, console, **judged)
    with console.work():
        import qtrace

        qconfig = qtrace.load_recipe(recipe, allow_code=allow_code)
        traced = None if models.needs_example(model) else models.load_model(model, allow)
        if traced is not None:
            models.check_size(traced, model, qconfig, data)
        reading: dict[str, Any] = {
            "batch_size": batch_size,
            "max_batches": max_batches,
            "skip_bad": skip_bad,
        }
        source = models.open_source(data, console, qconfig=qconfig, **reading)
        judge.hold_back(source, qconfig, reading)
        work = resumable_folder(
            out, names=(*FILES, CURE, VERDICT), force=force, resume=resume, note=console.note
        )
        with work as (folder, checkpoints):
            if traced is None:
                traced = models.trace_factory(model, data=source)
            prepared = qtrace.prepare(traced, qconfig, samples=_samples(source))
            console.note(f"calibrating on {data}")
            settings = {**collecting, "allow": allow}
            result = _collect(prepared, source, {"source": data, **reading}, checkpoints, console, settings)
            judge.keep_float(prepared)
            engines = {"threads": settings["threads"], "learning_engine": learning_engine}
            collection = _finish(prepared, source, result, checkpoints, console, engines)
            summary = {"model": model, "data": data, "recipe": recipe, **collection}
            write_folder(folder, prepared, summary)
            facts = note_graph(prepared, console)
            outcome = judge.conclude(prepared, source, collection["batches"])
            outcome.write(folder, facts)
        checks = check_graph(qconfig, outcome.verdict, judged["metric"], facts)
    models.note_skipped(source, console)
    files = [str(out / name) for name in FILES]
    outcome.note(console)
    facts.update(note_checks(console, checks))
    console.result("\n".join(files), {**summary, **facts, **outcome.summary, "files": files})
    return 0 if outcome.passed and checks.passed else 1


def _samples(source: DataSource) -> Iterator[Any]:
    """Yields the batches of ``source`` up to one that cannot be read, of which the calibration tells."""
    batches = iter(source)
    while True:
        try:
            batch = next(batches)
        except (StopIteration, QtraceError):
            return
        yield batch


def _collect(
    prepared: Any,
    source: DataSource,
    reading: dict[str, Any],
    folder: Path,
    console: Console,
    settings: dict[str, Any],
) -> Result:
    """Collects the statistics of all sites of ``prepared``.

    Args:
        prepared: the prepared graph.
        source: the calibration data.
        reading: the fields of `Source` but its preprocess, from which workers open the data.
        folder: the folder of checkpoints.
        console: shows progress and notes.
        settings: the fields of `RunSettings` but ``progress``.
    """
    from qtrace.calibration.jobs import Source
    from qtrace.calibration.running import RunSettings, collect_all
    from qtrace.preparation.model import QuantizedModel

    preprocess = QuantizedModel(prepared).record.qconfig.get("preprocess")
    return collect_all(
        prepared,
        source,
        Source(preprocess=preprocess, **reading),
        folder,
        RunSettings(progress=console.progress, **settings),
        console.note,
    )


def _finish(
    prepared: Any, source: DataSource, result: Result, folder: Path, console: Console, engines: dict[str, Any]
) -> dict[str, Any]:
    """Sets the ranges of ``prepared`` from the statistics in ``result``, and runs the recipe's algorithms.

    Returns:
        The engine, the number of batches and the images that were skipped, for the report.
    """
    import qtrace

    chosen, statistics = result.collected.chosen, result.collected.statistics
    console.note(f"engine {chosen.name}: {chosen.reason}")
    engine = chosen.name if chosen.everywhere else "megengine"
    qtrace.calibrate(
        prepared,
        source,
        progress=console.progress,
        engine=engine,
        statistics=statistics,
        state=folder,
        **engines,
    )
    for line in qtrace.explain(prepared).algorithms():
        console.note(line)
    source.skipped[:] = result.skipped
    return {
        "engine": {"name": chosen.name, "reason": chosen.reason},
        "batches": len(statistics.batches),
        "skipped": list(result.skipped),
    }


def write_folder(folder: Path, prepared: Any, summary: dict[str, Any]) -> None:
    """Writes `FILES` of a calibrated graph.

    Args:
        folder: the folder to write into.
        prepared: the calibrated graph.
        summary: the first entries of report.json.
    """
    import qtrace

    quantized = qtrace.convert(prepared)
    explanation = qtrace.explain(prepared)
    report = {
        "qtrace": qtrace.__version__,
        **summary,
        "ptq": list(explanation.ptq),
        "sites": _sites(prepared),
    }
    qtrace.save(prepared, folder / "prepared.mge")
    qtrace.save(quantized, folder / "quantized.mge")
    (folder / "report.json").write_text(
        json.dumps(report, indent=2, allow_nan=False) + "\n", encoding="utf-8"
    )
    (folder / "explain.txt").write_text(explanation.table(None) + "\n", encoding="utf-8")


def _sites(prepared: Any) -> list[dict[str, Any]]:
    """Lists all sites with scheme, scale and zero point, which are null at a site that saw no data."""
    from qtrace.preparation.record import fake_quants, read_record

    native, sites = read_record(prepared).native, []
    for site in fake_quants(prepared):
        numbers = site.qparams().to_dict() if site.calibrated else {"scale": None, "zero_point": None}
        own = {"native": native[site.site].origin} if site.site in native else {}
        sites.append({"site": site.site, "scheme": site.scheme.to_dict(), **numbers, **own})
    return sites

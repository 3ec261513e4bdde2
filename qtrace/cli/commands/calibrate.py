"""The command ``qtrace calibrate``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from qtrace.cli import help, hosts, models, options, targets
from qtrace.cli.console import Console
from qtrace.cli.images import warn_unused
from qtrace.cli.verdicts import NextCommand, check_graph, import_metric, judging, note_checks
from qtrace.quantizing.options import DataReading, FolderOptions
from qtrace.runtimes.host import RuntimeHost

__all__ = ["calibrate"]


@click.command(
    cls=help.Command,
    example="qtrace calibrate resnet18.mge --data images/ --recipe resnet50 --out resnet18-int8",
)
@click.argument("model")
@options.data(required=True)
@options.recipe("int8")
@targets.folder_to_write("The folder to write.")
@options.float_type
@judging
@options.collecting
@hosts.runtime_host
@click.option(
    "--learning-engine",
    type=click.Choice(["auto", "megengine", "torch"]),
    default="auto",
    show_default=True,
    help="The engine that learns roundings (adaround, reconstruct); auto takes torch where it applies.",
)
@click.option("--resume", is_flag=True, help="Go on where an interrupted calibration stopped.")
@click.option("--force", is_flag=True, help="Replace the output folder of an earlier calibration.")
@options.prefer
@options.allow
@options.progress
@options.output
@options.derived(FolderOptions, into="given")
def calibrate(
    model: str,
    data: str,
    reading: dict[str, Any],
    recipe: str,
    allow_code: bool,
    out: Path,
    float_type: str | None,
    collecting: dict[str, Any],
    runtime_host: RuntimeHost | None,
    given: dict[str, Any],
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
    run next. It is measured on --evaluation, or on data that are held back if there is enough. The exit code
    is 1 if it is broken, or if --at-least or a limit of the recipe's `expect` does not hold.
    """
    metric = judged["metric"]
    with console.work():
        from qtrace.calibration.running import RunSettings
        from qtrace.preparation.model import QuantizedModel
        from qtrace.quantizing.judging import Acceptance
        from qtrace.quantizing.stage import calibrate_to_folder

        qconfig = models.load_recipe(recipe, allow_code)
        if float_type is not None:
            qconfig = qconfig.model_copy(update={"float": float_type})
        warn_unused(data, qconfig, console)
        acceptance = Acceptance(None if metric is None else import_metric(metric), judged["at_least"])
        traced = None if models.needs_example(model) else models.load_model(model, allow)
        if traced is not None:
            models.check_size(traced, model, qconfig, data)
        done = calibrate_to_folder(
            (lambda source: models.trace_factory(model, data=source)) if traced is None else traced,
            data,
            out,
            recipe=qconfig,
            reading=DataReading(**reading),
            evaluation=judged["evaluation"],
            acceptance=acceptance,
            settings=RunSettings(
                **collecting, progress=console.progress, allow=allow, runtime_host=runtime_host
            ),
            resume=resume,
            force=force,
            progress=console.progress,
            importing=recipe,
            about={"model": model, "data": data, "recipe": recipe},
            **given,
        )
        verdict = done.judgement.verdict
        checks = check_graph(qconfig, verdict, metric, done.figures)
        following = ""
        if (diagnosis := done.judgement.diagnosis) is not None:
            command = NextCommand(click.get_current_context().params, judged, done.more_data)
            following = command.after(diagnosis, QuantizedModel(done.prepared).annotation.backend)
    facts = {**done.judgement.to_dict()}
    if diagnosis is not None:
        for line in (*diagnosis.lines(), f"next: {following}"):
            console.note(line)
        facts["next"] = following
    facts = {**done.summary, **done.figures, **note_checks(console, checks), **facts}
    console.result("\n".join(done.files), {**facts, "files": list(done.files)})
    return 0 if done.judgement.passed and checks.passed else 1

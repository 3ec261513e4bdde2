"""The commands that quantize: ``qtrace quantize`` and ``qtrace calibrate``."""

from __future__ import annotations

from typing import Any

import click

from qtrace.cli import models, options
from qtrace.cli.console import Console
from qtrace.cli.models import change_config, warn_unused
from qtrace.cli.verdicts import NextCommand, check_graph, import_metric, judging, note_checks
from qtrace.quantizing.figures import note_file
from qtrace.quantizing.options import DataReading, FolderOptions, QuantizeOptions

__all__ = ["calibrate", "quantize"]


@options.command(
    example="""
        qtrace quantize net.onnx --data images/ --recipe resnet50 -o net-int8.onnx
        qtrace quantize net.onnx --data train.npy --metric metrics:accuracy --max-drop 0.01 -o net.tflite
    """,
)
@click.argument("model")
@options.data(required=True)
@options.recipe()
@click.option("--target", metavar="T", help="The backend; default: the recipe's, or that of OUT's suffix.")
@options.file_to_write(
    "--out", "-o", required=True, help="The file to write: .onnx, .tflite, .param or .mge."
)
@options.input_shapes
@options.float_type
@judging
@options.prefer
@options.runtime_host
@click.option(
    "--card", is_flag=True, help="Also write OUT.card.json and OUT.card.html, which describe the file."
)
@options.allow
@options.progress
@options.output
@options.derived(
    QuantizeOptions,
    "prefer",
    "card",
    max_drop="How far the metric may be below its value in float: layers are raised to float until it holds.",
    verify="Do not run the file in its runtime.",
    measure="Do not time the file against your own or float.",
    keep="Write the quantized file though it is slower than float here.",
    allow_broken="Write the file though the verdict is broken.",
)
def quantize(
    model: models.NamedModel,
    data: models.NamedData,
    recipe: models.NamedRecipe,
    target: str | None,
    out: options.FileToWrite,
    judged: dict[str, Any],
    fields: dict[str, Any],
    console: Console,
) -> int:
    """Quantize a network to a verified file in one step.

    MODEL is an .onnx file, a file of `qtrace trace` or `qtrace import`, or pkg.mod:factory, which is traced
    on the first batch. The network is prepared, calibrated and judged; then the file is written, and run in
    its runtime next to the graph. The file --out appears only if the verdict is not broken, the limits hold,
    and the runtime computes what the graph computes. If it is slower than float here beyond the spread of
    the measurement, the file is in float, unless the recipe asks for the quantized one. `qtrace calibrate`
    also writes what each op became, and a model to train on.

    The exit code is 1 if there is no file for one of these reasons. It is also 1 if a limit of the recipe's
    `expect` is broken; the file is written all the same.
    """
    metric = judged["metric"]
    with console.work():
        import qtrace
        from qtrace.config.checking import is_precision
        from qtrace.config.recipe import is_packaged
        from qtrace.quantizing.targets import choose_config

        loaded: Any = recipe.name
        if loaded is not None and not is_packaged(loaded):
            loaded = qtrace.load_recipe(loaded, allow_code=recipe.allow_code)
        qconfig = change_config(choose_config(target, loaded, out.path, recipe.float_type))
        warn_unused(data.name, qconfig, console)
        source: Any = model.name
        if model.is_factory:
            source = models.build_module(source)
        elif not models.is_onnx(source):
            source = model.load()
        card = fields.pop("card")
        fields |= {
            "shapes": fields["shapes"] or None,
            "keep": fields["keep"] or is_precision(recipe.name),
            "metric": None if metric is None else import_metric(metric),
        }
        result = qtrace.quantize(
            source,
            data.name,
            out.path,
            recipe=qconfig,
            allow=model.allow,
            force=out.force,
            progress=console.progress,
            **{**judged, **data.reading, **fields},
        )
        figures = note_file(result.converted, out.path, console)
        checks = check_graph(models.preprocessing(result.converted), result.verdict, metric, figures)
        cards = result.card.save(out.path) if card else ()
    for line in result.summary()[1:]:
        console.note(line)
    if cards:
        console.note(f"card: {' and '.join(map(str, cards))}")
    facts = {"file": str(out.path), **figures, **note_checks(console, checks), **result.to_dict()}
    verified = None if result.verify is None else bool(result.verify.passed)
    console.result(str(out.path), {**facts, "raised": list(result.raised), "verified": verified})
    return 0 if checks.passed else 1


@options.command(example="qtrace calibrate resnet18.mge --data images/ --recipe resnet50 --out resnet18-int8")
@click.argument("model")
@options.data(required=True)
@options.recipe("int8")
@options.folder_to_write("The folder to write.")
@options.grouped("folder", "out", "resume", "force")
@options.float_type
@judging
@options.runtime_host
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
@options.prefer
@options.allow
@options.progress
@options.output
@options.derived(FolderOptions)
def calibrate(
    model: models.NamedModel,
    data: models.NamedData,
    recipe: models.NamedRecipe,
    folder: dict[str, Any],
    collecting: dict[str, Any],
    fields: dict[str, Any],
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

        qconfig = recipe.load()
        warn_unused(data.name, qconfig, console)
        acceptance = Acceptance(None if metric is None else import_metric(metric), judged["at_least"])
        traced = model.load_for(data, qconfig)
        done = calibrate_to_folder(
            (lambda source: models.trace_factory(model.name, data=source)) if traced is None else traced,
            data.name,
            recipe=qconfig,
            reading=DataReading(**data.reading),
            evaluation=judged["evaluation"],
            acceptance=acceptance,
            settings=RunSettings(**collecting, progress=console.progress, allow=model.allow),
            progress=console.progress,
            importing=recipe.name,
            about={"model": model.name, "data": data.name, "recipe": recipe.name},
            **folder,
            **fields,
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

"""The command ``qtrace finetune``."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import click

from qtrace.cli import models, options
from qtrace.cli.console import Console
from qtrace.cli.models import PREPARED
from qtrace.quantizing.reporting import FILES, write_folder
from qtrace.storage.outputs import resumable_folder

_CHECKPOINT = "finetune.part.npz"


@click.command(
    cls=options.Command,
    example="""
        qtrace finetune w4a4/prepared.mge --data images/ --out w4a4-tuned
        qtrace finetune w4a4/prepared.mge --data images/ --eval-data unseen/ --steps 2000 --out tuned --resume
    """,
)
@click.argument("model")
@options.data(required=True, batch_size=32)
@click.option(
    "--eval-data", metavar="D", help="Data to evaluate on, as --data; by default a tenth of --data."
)
@options.folder_to_write("The folder to write.")
@click.option("--steps", type=click.IntRange(1), default=500, show_default=True, help="Steps to take.")
@click.option("--minutes", type=float, help="Take only as many steps as fit into this time.")
@click.option(
    "--lr",
    type=float,
    default=0.0125,
    show_default=True,
    help="Learning rate, in quantization steps of each weight.",
)
@click.option("--range-lr", type=float, help="Learning rate of ranges; as --lr if left out.")
@click.option(
    "--freeze-below", type=float, help="Ranges stay once they move fewer quantization steps in a step."
)
@click.option(
    "--block",
    "blocks",
    metavar="NAME",
    multiple=True,
    help="Compare this node instead of those found by structure. Repeatable.",
)
@click.option(
    "--engine",
    type=click.Choice(["auto", "megengine", "torch"]),
    default="auto",
    show_default=True,
    help="What computes the steps; torch needs the extra `torch`.",
)
@click.option("--teacher", metavar="F", help="The float network, if `ptq` algorithms changed the weights.")
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the order of the data."
)
@click.option("--recipe", "-r", metavar="R", help="For its preprocess, if that is not the model's.")
@click.option(
    "--checkpoint-steps",
    type=click.IntRange(1),
    default=100,
    show_default=True,
    help="Steps between checkpoints.",
)
@click.option("--resume", is_flag=True, help="Go on where an interrupted run stopped.")
@click.option("--force", is_flag=True, help="Replace the output folder of an earlier run.")
@options.allow
@options.progress
@options.output
def finetune(
    model: models.NamedModel,
    data: models.NamedData,
    out: Path,
    resume: bool,
    force: bool,
    console: Console,
    **arguments: Any,
) -> None:
    """Train a quantized graph to reproduce its float outputs, without labels.

    MODEL is a folder that `qtrace calibrate` wrote, or its prepared.mge. The folder --out appears whole or
    not at all. It holds prepared.mge, quantized.mge (to be exported), report.json (the loss, the held-back
    error, the outputs before and after, what was frozen when, and all sites) and explain.txt.

    The result is the state with the smallest error on held-back data. If no step was better than MODEL, the
    result is MODEL as it was, and the report says so; the exit code is 0.
    """
    model = model.in_folder(PREPARED)
    with console.work(logging.INFO):  # whose estimate of the time the user needs
        import qtrace

        settings = _settings(arguments, data.reading["batch_size"])
        prepared = model.load()
        teacher = model.load_float(arguments["teacher"], prepared)
        models.check_stage(prepared, model.name, "prepared")
        recipe = models.NamedRecipe(arguments["recipe"])
        source = data.open_for(prepared, model, recipe, console)
        unseen = None
        if arguments["eval_data"]:
            unseen = data.other(arguments["eval_data"]).open_for(prepared, model, recipe, console)
        work = resumable_folder(out, names=FILES, force=force, resume=resume, note=console.note)
        with work as (folder, checkpoints):
            report = qtrace.finetune(
                prepared,
                source,
                settings,
                evaluation=unseen,
                teacher=teacher,
                checkpoint=checkpoints / _CHECKPOINT,
                resume=resume,
                progress=console.progress,
            )
            summary = {"model": model.name, "data": data.name, "finetuning": report.to_dict()}
            write_folder(folder, prepared, summary)
    files = [str(out / name) for name in FILES]
    console.result("\n".join([report.table(), "", *files]), {**summary, "files": files})


def _settings(arguments: dict[str, Any], batch_size: int) -> Any:
    """Builds the settings of the run; options that are None keep their default."""
    from qtrace.extras.finetune import FinetuneSettings

    fields = {name: arguments[name] for name in ("steps", "lr", "range_lr", "freeze_below", "seed", "engine")}
    fields |= {
        "blocks": arguments["blocks"] or None,
        "checkpoint_every": arguments["checkpoint_steps"],
        "max_minutes": arguments["minutes"],
    }
    fields = {name: value for name, value in fields.items() if value is not None}
    return FinetuneSettings(batch_size=batch_size, **fields)

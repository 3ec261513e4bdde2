"""The command ``qtrace export``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from qtrace.cli import help, models, options, targets
from qtrace.cli.console import Console
from qtrace.cli.naming import CONVERTED, note_ends
from qtrace.cli.verdicts import check_file, note_checks
from qtrace.quantizing.figures import note_device, note_file, note_kernels
from qtrace.storage.outputs import check_foreign, output_file

__all__ = ["export"]


def _pairs(_: click.Context, __: click.Parameter, pairs: tuple[str, ...]) -> dict[str, Any]:
    """Parses ``NAME=VALUE`` pairs to a dict; values are read as in a recipe: ``true``, ``8``, text."""
    values: dict[str, Any] = {}
    for pair in pairs:
        name, sign, text = pair.partition("=")
        if not name or not sign:
            raise click.BadParameter(f"{pair!r} is not of the form NAME=VALUE, such as packed=true.")
        values[name.replace("-", "_")] = _value(pair, text)
    return values


def _names(_: click.Context, __: click.Parameter, text: str | None) -> list[str] | None:
    """Parses names with commas between them."""
    return None if text is None else [name.strip() for name in text.split(",")]


def _value(pair: str, text: str) -> Any:
    """Parses the value ``text`` of ``pair``."""
    from qtrace.config.tree import read

    problems = [] if text.strip() else [": it is empty: write null, or quotes for empty text."]
    tree = None if problems else read(text, "value", problems)
    if tree is None or problems:
        reason = problems[0].partition(": ")[2]  # without the place, which is always line 1
        raise click.BadParameter(f"the value of {pair!r} cannot be read as YAML: {reason}")
    return tree.plain()


@click.command(
    cls=help.Command,
    example="""
    qtrace export resnet18-int8/quantized.mge -o resnet18.onnx
    qtrace export resnet18-int8/quantized.mge -o resnet18.onnx -f onnx_float -O params=aimet-2.0.0
    qtrace export resnet18.mge -o resnet18-float.onnx
    """,
)
@click.argument("model")
@targets.file_to_write("--out", "-o", required=True, help="The file to write.")
@click.option(
    "--format",
    "-f",
    "file_format",
    metavar="F",
    callback=options.importable,
    help="The format, if the suffix does not say it, or pkg.mod:NAME of your own.",
)
@click.option(
    "--option",
    "-O",
    "settings",
    metavar="NAME=VALUE",
    multiple=True,
    callback=_pairs,
    help="An option of the format, such as packed=true for .onnx or io=int8 for .tflite. Repeatable.",
)
@click.option(
    "--allow-float",
    metavar="OP",
    multiple=True,
    help="Keep this kind of op in float where the format cannot express it on integers. Repeatable.",
)
@click.option(
    "--input-names", metavar="A,B", callback=_names, help="Names for all inputs of an .onnx file, in order."
)
@click.option(
    "--output-names", metavar="A,B", callback=_names, help="Names for all outputs of an .onnx file, in order."
)
@click.option(
    "--embed-preprocess",
    is_flag=True,
    help="The .onnx file takes pixels, uint8 N x H x W x C, and normalizes them as the recipe says.",
)
@click.option(
    "--nms",
    metavar="NAME=VALUE",
    multiple=True,
    callback=_pairs,
    help="The .onnx or .tflite file of a detector chooses its boxes: boxes=OUTPUT, scores=OUTPUT, "
    "objectness=OUTPUT, form=cxcywh, iou=0.5, score=0.05, limit=100. Repeatable.",
)
@click.option("--example", is_flag=True, help="Also write a script that runs the file, beside --out.")
@click.option(
    "--test-vectors",
    type=click.IntRange(1),
    metavar="N",
    help="Also write inputs and expected integers of N samples of --data, beside --out in NAME.vectors.",
)
@options.data(required=False, batch_size=1)
@options.recipe()
@options.allow
@options.output
def export(
    model: str,
    out: Path,
    force: bool,
    file_format: str | None,
    settings: dict[str, Any],
    allow_float: tuple[str, ...],
    input_names: list[str] | None,
    output_names: list[str] | None,
    embed_preprocess: bool,
    nms: dict[str, Any],
    example: bool,
    test_vectors: int | None,
    data: str | None,
    reading: dict[str, Any],
    recipe: str | None,
    allow_code: bool,
    allow: tuple[str, ...],
    console: Console,
) -> int:
    """Write a model for a runtime.

    MODEL is the folder of `qtrace calibrate` or its quantized.mge, or a float.mge of `qtrace trace`, which is
    written in float. A file that another tool wrote is replaced by --force only, and MODEL never. A format of
    several files puts the others next to --out. In the end the command notes the size, the
    multiply-accumulates and, for a runtime with a cost table, the predicted time compared with float. The
    exit code is 1 if size or time are above the limits of the recipe's `expect`. The file is written all the
    same. --test-vectors is for firmware: what a device must compute, as raw files and as .npz, with an index.
    """
    if (test_vectors is None) != (data is None):
        raise click.UsageError("--test-vectors and --data belong together: give both, or none.")
    if example and out.suffix not in (".onnx", ".tflite"):
        raise click.UsageError(f"--example writes scripts for .onnx and .tflite files, not for {out.name}.")
    model = models.model_file(model, CONVERTED)
    with console.work():
        import qtrace
        from qtrace.export.example import example_path

        if example:
            check_foreign(example_path(out), force=force)
        loaded = models.load_model(model, allow)
        chosen = {
            "allow_float": allow_float,
            "input_names": input_names,
            "output_names": output_names,
            "preprocess": embed_preprocess,
            "nms": nms,
        }
        settings = {**settings, **{name: value for name, value in chosen.items() if value}}
        with output_file(out, force=force) as partial:
            qtrace.export(loaded, str(partial), format=file_format, **settings)
        facts = note_file(loaded, out, console)
        facts |= note_device(loaded, out, console)
        facts |= note_kernels(loaded, out, console)
        ends = note_ends(loaded, out, console)
        if example:
            facts["example"] = _write_example(loaded, out, ends["inputs"], embed_preprocess, force)
        facts.update(ends)
        if test_vectors is not None and data is not None:
            qconfig = models.preprocessing(loaded, recipe, allow_code)
            models.check_size(loaded, model, qconfig, data)
            source = models.open_source(data, console, qconfig=qconfig, **reading)
            facts["vectors"] = str(_write_vectors(loaded, out, source, test_vectors))
            console.note(f"{facts['vectors']}: {test_vectors} test vectors")
    config = models.preprocessing(loaded, None)
    checks = check_file(config, out.name, facts.get("bytes"), facts.get("predicted_seconds"), measured=False)
    facts.update(note_checks(console, checks))
    console.result(str(out), {"file": str(out), **facts})
    return 0 if checks.passed else 1


def _write_example(loaded: Any, out: Path, inputs: list[dict[str, Any]], embedded: bool, force: bool) -> str:
    """Writes the script that runs the file ``out``."""
    from qtrace.export.example import write_example
    from qtrace.preparation.model import QuantizedModel, is_quantized

    preprocess = QuantizedModel(loaded).config.preprocess if is_quantized(loaded) else None
    ends = [(end["name"], end["dtype"], end["shape"]) for end in inputs]
    script, text = write_example(out, ends, preprocess, embedded)
    with output_file(script, force=force) as partial:
        Path(partial).write_text(text, encoding="utf-8")
    return str(script)


def _write_vectors(loaded: Any, out: Path, source: Any, count: int) -> Path:
    """Writes the test vectors next to the file ``out``."""
    from qtrace.extras.device import write_vectors

    models.check_stage(loaded, str(out), "converted")
    return write_vectors(loaded, out.with_name(f"{out.stem}.vectors"), source, count)

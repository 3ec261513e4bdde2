"""The commands for exported files: ``qtrace export``, ``verify``, ``bisect`` and ``bench``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qtrace.cli import models, options
from qtrace.cli.console import Console
from qtrace.cli.models import CONVERTED, check_exported, note_ends
from qtrace.cli.verdicts import FAKE_QUANTS, SampleCounter, check_file, note_checks, samples_of
from qtrace.errors import ConfigError
from qtrace.quantizing.figures import note_device, note_file, note_kernels
from qtrace.storage.outputs import check_foreign

if TYPE_CHECKING:
    from qtrace.benchmarking.files import FileReport
    from qtrace.cli.verdicts import Expectations
    from qtrace.costs import CostTable

__all__ = ["bench", "bisect", "export", "verify"]


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


@options.command(
    example="""
    qtrace export resnet18-int8/quantized.mge -o resnet18.onnx
    qtrace export resnet18-int8/quantized.mge -o resnet18.onnx -f onnx_float -O params=aimet-2.0.0
    qtrace export resnet18.mge -o resnet18-float.onnx
    """,
)
@click.argument("model")
@options.file_to_write("--out", "-o", required=True, help="The file to write.")
@options.grouped(
    "written", "format", "settings", "allow_float", "input_names", "output_names", "preprocess", "nms"
)
@click.option(
    "--format",
    "-f",
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
    "preprocess",
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
    model: models.NamedModel,
    out: options.FileToWrite,
    written: dict[str, Any],
    example: bool,
    test_vectors: int | None,
    data: models.NamedData | None,
    recipe: models.NamedRecipe,
    console: Console,
) -> int:
    """Write a model for a runtime.

    MODEL is the folder of `qtrace calibrate` or its quantized.mge, or a float.mge of `qtrace trace`, which is
    written in float. Only --force replaces another tool's file; nothing replaces MODEL. A format of
    several files puts the others next to --out. In the end the command notes the size, the
    multiply-accumulates and, for a runtime with a cost table, the predicted time compared with float. The
    exit code is 1 if size or time are above the limits of the recipe's `expect`. The file is written all the
    same. --test-vectors is for firmware: what a device must compute, as raw files and as .npz, with an index.
    """
    if (test_vectors is None) != (data is None):
        raise click.UsageError("--test-vectors and --data belong together: give both, or none.")
    path = out.path
    if example and path.suffix not in (".onnx", ".tflite"):
        raise click.UsageError(f"--example writes scripts for .onnx and .tflite files, not for {path.name}.")
    model = model.in_folder(CONVERTED)
    with console.work():
        import qtrace
        from qtrace.export.example import example_path

        if example:
            check_foreign(example_path(path), force=out.force)
        loaded = model.load()
        settings = {**written.pop("settings"), **{name: value for name, value in written.items() if value}}
        with out.open() as partial:
            qtrace.export(loaded, str(partial), **settings)
        facts = note_file(loaded, path, console)
        facts |= note_device(loaded, path, console)
        facts |= note_kernels(loaded, path, console)
        ends = note_ends(loaded, path, console)
        if example:
            facts["example"] = _write_example(loaded, out, ends["inputs"], written["preprocess"])
        facts.update(ends)
        if test_vectors is not None and data is not None:
            source = data.open_for(loaded, model, recipe, console)
            facts["vectors"] = str(_write_vectors(loaded, path, source, test_vectors))
            console.note(f"{facts['vectors']}: {test_vectors} test vectors")
    config = models.preprocessing(loaded)
    checks = check_file(config, path.name, facts.get("bytes"), facts.get("predicted_seconds"), measured=False)
    facts.update(note_checks(console, checks))
    console.result(str(path), {"file": str(path), **facts})
    return 0 if checks.passed else 1


def _write_example(
    loaded: Any, out: options.FileToWrite, inputs: list[dict[str, Any]], embedded: bool
) -> str:
    """Writes the script that runs the file ``out``."""
    from qtrace.export.example import write_example
    from qtrace.preparation.model import QuantizedModel, is_quantized

    preprocess = QuantizedModel(loaded).config.preprocess if is_quantized(loaded) else None
    ends = [(end["name"], end["dtype"], end["shape"]) for end in inputs]
    script, text = write_example(out.path, ends, preprocess, embedded)
    options.FileToWrite(script, out.force).write(text)
    return str(script)


def _write_vectors(loaded: Any, out: Path, source: Any, count: int) -> Path:
    """Writes the test vectors next to the file ``out``."""
    from qtrace.extras.device import write_vectors

    models.check_stage(loaded, str(out), "converted")
    return write_vectors(loaded, out.with_name(f"{out.stem}.vectors"), source, count)


@options.command(
    example="qtrace verify resnet18.onnx --model int8/quantized.mge --data images/ --recipe resnet50",
)
@click.argument("file")
@click.option("--model", "-m", metavar="MODEL", required=True, help="The model that made FILE.")
@options.runtime
@options.runtime_host
@options.grouped("where", "runtime", "runtime_host")
@options.dumped
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
    model: models.NamedModel,
    where: dict[str, Any],
    dumps: options.Dumps | None,
    data: models.NamedData,
    recipe: models.NamedRecipe,
    float_model: str | None,
    console: Console,
) -> int:
    """Run an exported file in its runtime next to the graph, and compare every site.

    The exit code is 1 if an op differs, or if the file's outputs are farther from float than the graph's. It
    is also 1 if the graph itself has lost columns of an output. MODEL is a folder of `qtrace calibrate` or
    its quantized.mge, or for a float file the float.mge of `qtrace trace`: then the outputs are compared.
    Images and raw pixels are preprocessed by --recipe, or else by MODEL's own recipe. With --dumped, FILE is
    not run: the tensors of a device are compared, batch by batch.
    """
    if Path(file).is_dir():
        check_exported(Path(file))
    model = model.in_folder(CONVERTED)
    with console.work():
        import qtrace
        from qtrace.preparation.model import is_quantized

        loaded = model.load()
        if is_quantized(loaded):
            models.check_stage(loaded, model.name, "converted")
        network = model.load_float(float_model, loaded)
        source = data.open_for(loaded, model, recipe, console)
        where |= {} if dumps is None else {"runtime": dumps.runtime(loaded)}
        with console.bar(source, "verify") as batches:
            counter = SampleCounter(batches)
            report = qtrace.verify(file, loaded, counter, float_model=network, **where)
        text, result = report.table(), report.to_dict()
    measured = samples_of(counter.samples, "--data", data.reading["max_batches"])
    if is_quantized(loaded):
        measured += f" (graph: {FAKE_QUANTS}; the others: the runtime's outputs)"
    data_of = {"passed": bool(report.passed), "measured_on": measured, **result}
    console.result(f"{text}\nmeasured on {measured}", data_of)
    return 0 if report.passed and not result.get("lost_groups") else 1


@options.command(
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
@options.runtime
@click.option("--max-lsb", metavar="N", default=1, show_default=True, help="Ignore differences up to this.")
@options.runtime_host
@options.grouped("where", "runtime", "runtime_host")
@options.dumped
@options.data(required=True, reserved=("layout",))
@options.recipe()
@options.allow
@options.progress
@options.output
def bisect(
    file: str,
    model: models.NamedModel,
    where: dict[str, Any],
    dumps: options.Dumps | None,
    max_lsb: int,
    data: models.NamedData,
    recipe: models.NamedRecipe,
    console: Console,
) -> int:
    """Find the first op whose integers differ from the runtime's, and show the difference.

    The exit code is 1 if there is such an op. Images and raw pixels are preprocessed by --recipe, or
    else by MODEL's own recipe. With --dumped, FILE is not run: the tensors of a device are compared.
    """
    if Path(file).is_dir():
        check_exported(Path(file))
    model = model.in_folder(CONVERTED)
    with console.work():
        import qtrace

        loaded = model.load()
        models.check_stage(loaded, model.name, "converted")
        source = data.open_for(loaded, model, recipe, console)
        where |= {} if dumps is None else {"runtime": dumps.runtime(loaded)}
        with console.bar(source, "bisect") as batches:
            difference = qtrace.bisect(file, loaded, batches, max_lsb=max_lsb, **where)
        text = (
            f"no site differs by more than {max_lsb} LSB, and no output"
            if difference is None
            else difference.table()
        )
    console.result(text, {"found": None if difference is None else difference.to_dict()})
    return 0 if difference is None else 1


_PACKAGED = "packaged"


@options.command(example="qtrace bench float.onnx int8.onnx --by-op")
@click.argument("files", metavar="FILE...", nargs=-1, type=options.file_or_folder())
@click.option(
    "--runtime",
    metavar="NAME",
    help="The runtime, such as openvino for an .onnx; by default the one that the file is meant for.",
)
@options.runtime_host
@options.grouped("timing", "runtime", "runtime_host", "threads", "batch", "shapes", "seconds", "by_op")
@click.option("--threads", type=click.IntRange(1), default=1, help="Threads of the runtime; default: 1.")
@click.option(
    "--batch",
    type=click.IntRange(1),
    default=1,
    help="Samples of a run, if the file leaves them open; default: 1.",
)
@options.input_shapes
@click.option(
    "--seconds",
    type=click.FloatRange(0, 3600),
    default=3.0,
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
    timing: dict[str, Any],
    predict: str | None,
    recipe: models.NamedRecipe,
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

        config = _expecting(recipe)
        table = None if predict is None else _table(predict)
        report = measure(*files, **timing, predict=table, progress=console.progress)
    if table is not None:
        _note_differences(table, report.threads, console)
    checks = _check(config, report.files)
    console.result(report.table(), {**report.to_dict(), **note_checks(console, *checks)})
    return 0 if all(check.passed for check in checks) else 1


def _expecting(recipe: models.NamedRecipe) -> Any:
    """Loads a recipe that has an ``expect``; None for none."""
    config = recipe.load()
    if config is not None and config.expect is None:
        raise ConfigError(
            f"{recipe.name} expects nothing that could be checked: add expect with max_megabytes or "
            "max_milliseconds, or leave --recipe out."
        )
    return config


def _check(config: Any, reports: Sequence[FileReport]) -> list[Expectations]:
    """Checks the files after the first one, which the others are compared with, or a single file."""
    judged = reports[1:] or reports
    return [check_file(config, r.path.name, r.size, r.latency.median, measured=True) for r in judged]


def _table(name: str) -> CostTable:
    from qtrace.benchmarking.runners import describe_machine
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
    from qtrace.benchmarking.runners import describe_machine, differences

    here = describe_machine(table.machine.runtime, "onnxruntime", threads)
    if sentences := differences(table.machine, here):
        console.warn(f"the cost table was measured elsewhere: {'; '.join(sentences)}.")

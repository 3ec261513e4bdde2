"""The commands that report on a graph: ``qtrace explain``, ``compare`` and ``sensitivity``."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING, Any

import click

from qtrace.cli import models, options, verdicts
from qtrace.cli.console import Console
from qtrace.cli.models import CONVERTED, PREPARED
from qtrace.cli.verdicts import FAKE_QUANTS, SampleCounter, judge_comparison, samples_of, text_of
from qtrace.errors import ConfigError

if TYPE_CHECKING:
    from qtrace.inspection.comparison.report import ChannelRanges
    from qtrace.sensitivity.diagnosis import Diagnosis

__all__ = ["compare", "explain", "sensitivity"]


@options.command(
    example="""
        qtrace explain resnet18.mge --recipe resnet50
        qtrace explain int8/prepared.mge --why layer1.0.conv1
        qtrace explain int8/prepared.mge --dot graph.dot && dot -Tsvg graph.dot -o graph.svg
    """,
)
@click.argument("model")
@options.recipe()
@options.example
@click.option(
    "--why",
    metavar="NODE",
    help="Explain in full a node (also by its ONNX name), site, module (or a glob) or kind of op.",
)
@click.option("--all", "every", is_flag=True, help="Show ops on shapes and constants, too.")
@options.file_to_write("--dot", help="Also draw the graph into this file, for Graphviz.")
@options.allow
@options.output
def explain(
    model: models.NamedModel,
    recipe: models.NamedRecipe,
    shapes: models.Shapes,
    why: str | None,
    every: bool,
    dot: options.FileToWrite | None,
    console: Console,
) -> None:
    """Show for every op what is quantized, by which rule, or why it stays float.

    MODEL is a traced file (what the recipe would do), a prepared or quantized one or the folder of `qtrace
    calibrate` (what was done), or pkg.mod:factory with --shape.

    Below the table are the share that is computed on integers and, for everything that stays float, the line
    of a recipe that would change it. On a terminal the table is cut to its width; a pipe gets all of it.
    """
    model = model.in_folder(PREPARED)
    width = shutil.get_terminal_size().columns if on_terminal() else None
    with console.work():
        import qtrace
        from qtrace.preparation.figures import describe_precision
        from qtrace.preparation.model import is_quantized

        recipe.load()  # its mistakes are reported before tracing
        loaded = model.load_or_trace(shapes)
        if recipe.name and is_quantized(loaded):
            console.note(
                f"{model.name} is quantized already: this is its own quantization, and --recipe is ignored."
            )
        explanation = qtrace.explain(loaded, recipe.name, allow_code=recipe.allow_code)
        text, data = _result(explanation, why, every, width)
        if dot is not None:
            dot.write_graph(explanation.dot(every=every), console)
    console.note(describe_precision(explanation.annotation))
    console.result(text, data)


def on_terminal() -> bool:
    """Whether the result goes to a terminal."""
    return sys.stdout.isatty()


def _result(explanation: Any, why: str | None, every: bool, width: int | None) -> tuple[str, Any]:
    """Returns the result as text and as data."""
    if why is not None:
        stories = explanation.why(why)
        return "\n\n".join(s.text(width or 100) for s in stories), [s.to_dict() for s in stories]
    colour = width is not None and "NO_COLOR" not in os.environ
    return explanation.table(width, every=every, colour=colour), explanation.to_dict()


_DRAWN = 10  # sites whose channels are drawn


@options.command(
    example="""
        qtrace compare int8/quantized.mge --data unseen/ --recipe resnet50
        qtrace compare int8/prepared.mge --data unseen.npy --sort own --html errors.html --float float.mge
    """,
)
@click.argument("model")
@options.data(required=True)
@options.recipe()
@click.option(
    "--sort",
    type=click.Choice(["graph", "sqnr", "own", "cosine", "clipped"]),
    default="graph",
    show_default=True,
    help="The order of the sites: that of the graph, or the worst first by this column.",
)
@click.option(
    "--float",
    "float_model",
    metavar="F",
    help="The float network, if `ptq` algorithms or training changed the weights.",
)
@options.file_to_write("--html", help="Also write a page with plots into this file.")
@options.allow
@options.progress
@options.output
def compare(
    model: models.NamedModel,
    data: models.NamedData,
    recipe: models.NamedRecipe,
    sort: str,
    float_model: str | None,
    html: options.FileToWrite | None,
    console: Console,
) -> int:
    """Show where a quantized graph's error comes from, site by site.

    MODEL is a folder of `qtrace calibrate`, its prepared.mge or its quantized.mge. The error "own" arises at
    a site if all sites before it are float; "inherited" comes from those sites. Both are relative to the
    signal, in dB: higher is better. Use data that was not used to calibrate. The verdict above the table is
    measured on some samples at the beginning of --data, the table on all of them. The exit code is 1 if it is
    broken. Images and raw pixels are preprocessed by --recipe, or else by MODEL's own recipe.
    """
    model = model.in_folder(CONVERTED)
    width = shutil.get_terminal_size().columns if on_terminal() else None
    with console.work():
        import qtrace

        loaded = model.load()
        models.check_stage(loaded, model.name)
        source = data.open_for(loaded, model, recipe, console)
        network = model.load_float(float_model, loaded)
        with console.bar(source, "compare") as batches:
            counter = SampleCounter(batches)
            comparison = qtrace.compare(loaded, counter, float_model=network)
        diagnosis = judge_comparison(loaded, network, source, console)
        if html is not None:
            html.write(comparison.html(*_findings(diagnosis)))
    if html is not None:
        console.note(f"{html.path} is written: open it in a browser.")
    judged = {} if diagnosis is None else {"diagnosis": diagnosis.to_dict()}
    measured = f"{samples_of(counter.samples, '--data', data.reading['max_batches'])} ({FAKE_QUANTS})"
    text = f"{text_of(diagnosis)}sites and outputs: on {measured}\n{comparison.table(width, sort)}"
    console.result(text, {**judged, "measured_on": measured, **comparison.to_dict()})
    return 0 if diagnosis is None or diagnosis.verdict.word != "broken" else 1


def _findings(diagnosis: Diagnosis | None) -> tuple[list[str], list[ChannelRanges]]:
    """Returns the lines of a diagnosis, and the channels of the sites of its causes and of the worst ones."""
    from qtrace.inspection.comparison.report import ChannelRanges

    if diagnosis is None:
        return [], []
    remarks = {cause.site: f"{cause.name}: {cause.text}" for cause in diagnosis.causes if cause.site}
    measured = {e.site: e for e in diagnosis.sites}
    worst = sorted(measured.values(), key=lambda e: -e.channels.mean_relative_noise)
    names = list(dict.fromkeys((*(n for n in remarks if n in measured), *(e.site for e in worst))))[:_DRAWN]
    chosen = (measured[name] for name in names)
    return diagnosis.lines(), [
        ChannelRanges(
            site=e.site,
            low=e.channels.low,
            high=e.channels.high,
            noise=tuple(map(float, e.channels.relative_noise)),
            lo=e.lo,
            hi=e.hi,
            remark=remarks.get(e.site, ""),
        )
        for e in chosen
    ]


@options.command(
    example="""
        qtrace sensitivity float.mge --data images/ --recipe resnet50
        qtrace sensitivity float.mge --data images/ --eval-data unseen/ --recipe w4a4.yaml \\
            --metric agreement --max-drop 1 --raise w8a8 --patch mixed.yaml
        qtrace sensitivity float.mge --data images/ --recipe w4.yaml \\
            --raise w8 --budget 2e6 --patch mixed.yaml
        qtrace sensitivity detector.mge --data images/ --recipe w4a4.yaml --metric detection \\
            --level 0,1,2 --level 3,4,5 --level cls_out,box_out,obj_out
    """,
)
@click.argument("model")
@options.data(required=True)
@options.recipe("onnxruntime")
@click.option(
    "--eval-data", metavar="D", help="What to measure on, as --data; the calibration data if left out."
)
@click.option(
    "--metric",
    default="sqnr",
    show_default=True,
    help="sqnr (dB), agreement (percent), detection (minus the losses of a detector against its float "
    "graph), or pkg.mod:function, which gets the graph and returns a number.",
)
@click.option(
    "--level",
    "levels",
    metavar="CLS,BOX[,OBJ]",
    multiple=True,
    help="For --metric detection, once for each level: its outputs by name or number, the logits of classes, "
    "the boxes, and the logits of objectness where there are some.",
)
@click.option("--channels-last", is_flag=True, help="For --metric detection: channels on the last axis.")
@click.option(
    "--threshold",
    type=float,
    help="For --metric detection: the smallest float score of a location that counts.  [default: 0.3]",
)
@click.option("--at-least", type=float, help="Search for the fewest layers to raise to reach this metric.")
@click.option(
    "--max-drop", type=float, help="As --at-least, but how far the metric may be below its value in float."
)
@click.option("--budget", type=float, help="Search for the best layers to raise within this many --unit.")
@click.option("--unit", type=click.Choice(["bytes", "bops"]), default="bytes", show_default=True)
@click.option(
    "--raise",
    "raise_to",
    default="float",
    show_default=True,
    help="What layers become: float, a16, w8a8, ...",
)
@click.option("--groups", is_flag=True, help="Also measure every group of sites by itself.")
@options.file_to_write("--patch", help="Write the recipe that raises the layers here.")
@options.allow
@options.progress
@options.output
def sensitivity(
    model: models.NamedModel,
    data: models.NamedData,
    recipe: models.NamedRecipe,
    patch: options.FileToWrite | None,
    console: Console,
    **arguments: Any,
) -> int:
    """Show which layers cost accuracy, and find the fewest to raise.

    MODEL is a traced file or pkg.mod:factory; it is prepared by the recipe and calibrated on --data. Without
    a goal, every layer is measured by itself. With --at-least or --max-drop (or a recipe's `expect`, if its
    metric is --metric, or the name of the function there), the fewest layers are raised; with --budget, the
    best ones. The exit code is 1 if a goal is not reached.
    """
    with console.work():
        import qtrace
        from qtrace.data.base import batch_length
        from qtrace.sensitivity import DetectionLoss, analyze, mixed_precision

        qconfig = recipe.load()
        goal, metric = _goal(arguments, qconfig), _metric(arguments)
        if patch is not None and goal is None:
            raise ConfigError("--patch is written by a search: give --at-least, --max-drop or --budget, too.")
        if arguments["raise_to"] != "float" and goal is None:
            raise ConfigError("--raise is for a search: give --at-least, --max-drop or --budget, too.")
        traced = model.load_for(data, qconfig)
        source = data.open(console, qconfig)
        calibration = list(source)
        evaluation = calibration
        if arguments["eval_data"]:
            evaluation = list(data.other(arguments["eval_data"]).open(console, qconfig))
        if traced is None:
            traced = models.trace_factory(model.name, data=source)
        if goal is None:
            prepared = qtrace.prepare(traced, qconfig, samples=calibration or None)
            if isinstance(loss := metric.get("metric"), DetectionLoss):
                metric["metric"] = loss.of(prepared)  # before the calibration, which may take long
            qtrace.calibrate(prepared, calibration, progress=console.progress)
            groups = arguments["groups"]
            result: Any = analyze(
                prepared,
                evaluation,
                groups=groups,
                float_model=traced,
                progress=console.progress,
                **metric,
            )
        else:
            raise_to = arguments["raise_to"]
            result = mixed_precision(
                traced,
                qconfig,
                calibration,
                goal=goal,
                evaluation=evaluation,
                raise_to=raise_to,
                progress=console.progress,
                **metric,
            ).importing(_importable(str(recipe.name), patch))
        if patch is not None:
            patch.write(result.patch)
    width = shutil.get_terminal_size().columns if on_terminal() else None
    option = "--eval-data" if arguments["eval_data"] else "--data"
    measured = samples_of(sum(map(batch_length, evaluation)), option, data.reading["max_batches"])
    measured += "" if arguments["eval_data"] else ", which calibrate it, too"
    measured = f"{measured} ({FAKE_QUANTS})"
    text = f"{result.table(width)}\nmeasured on {measured}"
    console.result(text, {**result.to_dict(), "measured_on": measured})
    return 0 if getattr(result, "passed", True) else 1


def _goal(arguments: dict[str, Any], qconfig: Any) -> Any:
    """Builds the goal or the budget of the search; None without one."""
    from qtrace.sensitivity import Budget, Goal

    goals = [name for name in ("at_least", "max_drop", "budget") if arguments[name] is not None]
    if len(goals) > 1:
        flags = " and ".join("--" + name.replace("_", "-") for name in goals)
        raise ConfigError(f"{flags} are two goals: give one of them.")
    if arguments["budget"] is not None:
        return Budget(arguments["unit"], arguments["budget"])
    if goals:
        return Goal(arguments["at_least"], arguments["max_drop"])
    expected, metric = qconfig.expect, arguments["metric"]
    if expected is not None and expected.metric == metric.rpartition(":")[2].rpartition(".")[2]:
        return Goal(max_drop=expected.max_drop)
    if expected is not None and expected.min_sqnr is not None and metric == "sqnr":
        return Goal(at_least=expected.min_sqnr)
    return None


def _metric(arguments: dict[str, Any]) -> dict[str, Any]:
    """Builds the arguments that select the metric."""
    from qtrace.data import is_object_name

    name = arguments["metric"]
    if name == "detection":
        return {"metric": _detection(arguments)}
    detection_options = {
        "--level": bool(arguments["levels"]),
        "--channels-last": arguments["channels_last"],
        "--threshold": arguments["threshold"] is not None,
    }
    if any(detection_options.values()):
        flag = next(flag for flag, is_set in detection_options.items() if is_set)
        raise ConfigError(f"{flag} is for --metric detection: give that, too, or drop it.")
    if not is_object_name(name):
        return {"metric": name}
    return {"own": verdicts.import_metric(name)}


def _detection(arguments: dict[str, Any]) -> Any:
    """Builds a detector's loss from --level, --channels-last and --threshold."""
    from qtrace.sensitivity import DetectionLoss, Level

    if not arguments["levels"]:
        raise ConfigError(
            "--metric detection must know which outputs are what: give --level CLS,BOX[,OBJ] for each level, "
            "by name or number."
        )
    levels, axis = [], -1 if arguments["channels_last"] else 1
    for text in arguments["levels"]:
        parts = [part.strip() for part in text.split(",")]
        if len(parts) not in (2, 3) or not all(parts):
            raise ConfigError(f"--level {text!r} is not of the form CLS,BOX[,OBJ].")
        classes, boxes, *more = (int(p) if p.isdecimal() and len(p) < 10 else p for p in parts)
        levels.append(Level(classes, boxes, more[0] if more else None, axis))
    if arguments["threshold"] is None:
        return DetectionLoss(tuple(levels))
    return DetectionLoss(tuple(levels), arguments["threshold"])


def _importable(recipe: str, patch: options.FileToWrite | None) -> str:
    """Returns the name by which the patch imports the recipe: a file relative to the patch's folder."""
    from qtrace.config.recipe import importable

    return recipe if patch is None else importable(recipe, patch.path.parent)

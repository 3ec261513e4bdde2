"""The command ``qtrace compare``."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qtrace.cli import help, models, options, targets
from qtrace.cli.commands.explain import on_terminal
from qtrace.cli.console import Console
from qtrace.cli.naming import CONVERTED
from qtrace.cli.verdicts import FAKE_QUANTS, SampleCounter, judge_comparison, samples_of, text_of
from qtrace.storage.outputs import output_file

if TYPE_CHECKING:
    from qtrace.inspection.comparison.rows import ChannelRanges
    from qtrace.sensitivity.diagnosis import Diagnosis

__all__ = ["compare"]

_DRAWN = 10  # sites whose channels are drawn


@click.command(
    cls=help.Command,
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
@targets.file_to_write("--html", help="Also write a page with plots into this file.")
@options.allow
@options.progress
@options.output
def compare(
    model: str,
    data: str,
    reading: dict[str, Any],
    recipe: str | None,
    allow_code: bool,
    sort: str,
    float_model: str | None,
    html: Path | None,
    force: bool,
    allow: tuple[str, ...],
    console: Console,
) -> int:
    """Show where a quantized graph's error comes from, site by site.

    MODEL is a folder of `qtrace calibrate`, its prepared.mge or its quantized.mge. "own" is the error that
    arises at a site if all sites before it are float, "inherited" the error from those sites. Both are
    relative to the signal, in dB: higher is better. Use data that was not used to calibrate. The verdict
    above the table is measured on some samples at the beginning of --data, the table on all of them. The
    exit code is 1 if it is broken. Images and raw pixels are preprocessed by --recipe, or else by MODEL's own
    recipe.
    """
    model = models.model_file(model, CONVERTED)
    width = shutil.get_terminal_size().columns if on_terminal() else None
    with console.work():
        import qtrace

        loaded = models.load_model(model, allow)
        models.check_stage(loaded, model)
        qconfig = models.preprocessing(loaded, recipe, allow_code)
        models.check_size(loaded, model, qconfig, data)
        source = models.open_source(data, console, qconfig=qconfig, **reading)
        network = models.load_float(float_model, allow, loaded)
        with console.bar(source, "compare") as batches:
            counter = SampleCounter(batches)
            comparison = qtrace.compare(loaded, counter, float_model=network)
        diagnosis = judge_comparison(loaded, network, source, console)
        if html is not None:
            page = comparison.html(*_findings(diagnosis))
            with output_file(html, force=force) as partial:
                partial.write_text(page, encoding="utf-8")
    if html is not None:
        console.note(f"{html} is written: open it in a browser.")
    judged = {} if diagnosis is None else {"diagnosis": diagnosis.to_dict()}
    measured = f"{samples_of(counter.samples, '--data', reading['max_batches'])} ({FAKE_QUANTS})"
    text = f"{text_of(diagnosis)}sites and outputs: on {measured}\n{comparison.table(width, sort)}"
    console.result(text, {**judged, "measured_on": measured, **comparison.to_dict()})
    return 0 if diagnosis is None or diagnosis.verdict.word != "broken" else 1


def _findings(diagnosis: Diagnosis | None) -> tuple[list[str], list[ChannelRanges]]:
    """Returns the lines of a diagnosis, and the channels of the sites of its causes and of the worst ones."""
    from qtrace.inspection.comparison.rows import ChannelRanges

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

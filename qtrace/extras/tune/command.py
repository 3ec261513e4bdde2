"""The command ``qtrace tune``."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from qtrace.cli import models, options
from qtrace.cli.console import Console
from qtrace.cli.reports import on_terminal
from qtrace.cli.verdicts import import_metric
from qtrace.errors import ConfigError


class _Quantity(click.ParamType):
    """Converts a number with a unit, such as ``30m``, to a number of the first unit.

    Args:
        name: what it is, for --help and messages.
        units: unit -> its factor.
        example: a value for messages.
    """

    def __init__(self, name: str, units: dict[str, float], example: str) -> None:
        self.name, self.units, self.example = name, units, example

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parses one quantity."""
        if isinstance(value, (int, float)):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([a-zA-Z]+)", str(value))
        factor = self.units.get(match[2].lower()) if match else None
        number = float(match[1]) * factor if match and factor else 0.0
        if not 0 < number < math.inf:
            self.fail(f"{value!r} is no {self.name} such as {self.example}.", param, ctx)
        return number


_TIME = _Quantity("time", {"s": 1, "m": 60, "h": 3600}, "30m, 90s or 2h")
_LATENCY = _Quantity("time", {"ms": 1, "us": 1e-3, "s": 1e3}, "2.0ms")
_SIZE = _Quantity("size", {"b": 1, "kb": 2**10, "mb": 2**20, "gb": 2**30}, "4MB")


@click.command(
    cls=options.Command,
    example="""
        qtrace tune float.mge --data train.npy -o best
        qtrace tune float.mge --data images/ --recipe resnet50 --budget 30m --at-most 2.0ms \\
            --evaluation unseen/ -o best
        qtrace calibrate float.mge --data train.npy --recipe best/best.yaml --out int8
    """,
)
@click.argument("model")
@options.data(required=True, reserved=("size",))
@options.recipe("int8")
@options.folder_to_write("The folder to write.")
@click.option(
    "--metric",
    metavar="PKG.MOD:F",
    help="A function of the graph that returns a number, or one for each sample; more is better.  "
    "[default: SQNR of the worst output columns]",
)
@click.option("--evaluation", "-e", metavar="E", help="Data for the report at the end, which no trial sees.")
@click.option("--budget", type=_TIME, help="Stop after this time, such as 30m, 90s or 2h.")
@click.option(
    "--trials", type=click.IntRange(1), help="Stop after so many trials.  [default: 30 without --budget]"
)
@click.option("--at-most", type=_LATENCY, help="The longest predicted time of the result, such as 2.0ms.")
@click.option("--size", type=_SIZE, help="The largest size of its parameters, such as 4MB (2**20 bytes).")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="The seed of the search.")
@click.option(
    "--workers",
    type=click.IntRange(1, 1024),
    default=1,
    show_default=True,
    help="Trials that are judged at the same time, in processes of their own.",
)
@click.option(
    "--ray",
    metavar="ADDRESS",
    is_flag=False,
    flag_value="",
    help="Judge them on a Ray cluster; without ADDRESS on a local one.",
)
@click.option("--force", is_flag=True, help="Drop the trials that the folder holds.")
@options.allow
@options.output
def tune(
    model: models.NamedModel,
    data: models.NamedData,
    recipe: models.NamedRecipe,
    out: Path,
    metric: str | None,
    evaluation: str | None,
    console: Console,
    **search: Any,
) -> int:
    """Search for the best recipe of a model.

    Each trial prepares MODEL by a recipe, and calibrates it on a part of the data. The rest judges it, by the
    metric and by the predicted time and size. The folder --out gets trials.jsonl (a line for each trial),
    best.yaml (the best recipe, with a reason above each line) and tune.json. If the extra report is
    installed, it gets tune.html, a picture. A search that was stopped goes on if it is run again.

    Without --at-most and --size, the result is no slower and no larger than by --recipe. The exit code is 1
    if no recipe is within the limits.
    """
    with console.work():
        from qtrace.extras.tune import tune as run
        from qtrace.extras.tune.search import comments_of

        qconfig = recipe.load()
        function = None if metric is None else import_metric(metric)
        unseen = None if evaluation is None else _open_later(data.other(evaluation), console, qconfig)
        traced = model.load_for(data, qconfig)
        source = data.open(console, qconfig)
        if traced is None:
            traced = models.trace_factory(model.name, data=source)
        about = {"data": f"{data.name} {source.identity()}", "metric": metric, **data.reading}
        result = run(
            *(traced, qconfig, source, out, _settings(search)),
            metric=function,
            evaluation=unseen,
            about=about,
            reasons=comments_of(str(recipe.name), allow_code=recipe.allow_code),
            allow=model.allow,
            note=console.note,
            **{name: search[name] for name in ("force", "workers", "ray")},
        )
    width = shutil.get_terminal_size().columns if on_terminal() else None
    console.result(result.table(width), result.to_dict())
    return 0 if result.best is not None else 1


def _settings(search: dict[str, Any]) -> Any:
    """Builds the settings from --budget, --trials, --at-most, --size and --seed."""
    from qtrace.extras.tune import CostLimits, TuneSettings

    budget, trials, at_most, size = (search[name] for name in ("budget", "trials", "at_most", "size"))
    limits = (
        None if at_most is None and size is None else CostLimits(at_most, None if size is None else int(size))
    )
    if trials is None and budget is None:
        trials = TuneSettings.trials
    return TuneSettings(trials, budget, limits, search["seed"])


def _open_later(data: models.NamedData, console: Console, qconfig: Any) -> Callable[[], Iterable[Any]]:
    """Returns what opens the data of --evaluation, all of it, when it is called.

    Raises:
        ConfigError: when there is nothing of that name, which is known without reading it.
    """
    from qtrace.data import is_object_name

    if not is_object_name(data.name) and not Path(data.name).exists():
        raise ConfigError(f"--evaluation {data.name}: there is no such file or folder.")
    unlimited = replace(data, reading={**data.reading, "max_batches": None})
    return lambda: unlimited.open(console, qconfig)

"""The command ``qtrace diff``."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import click

from qtrace.cli import help, models, options
from qtrace.cli.commands.explain import on_terminal
from qtrace.cli.console import Console
from qtrace.cli.verdicts import VERDICT
from qtrace.errors import QtraceError

if TYPE_CHECKING:
    from qtrace.inspection.difference import Difference, FigurePair

__all__ = ["diff"]

_MODEL = "quantized.mge"  # of an output folder
_ROWS = 20


@click.command(
    cls=help.Command,
    example="""
        qtrace diff monday/ tuesday/
        qtrace diff int8/quantized.mge finetuned/quantized.mge --json
        qtrace diff resnet50 mine.yaml --exit-code
    """,
)
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option("--all", "every", is_flag=True, help=f"Show all rows of each table, not {_ROWS}.")
@click.option("--exit-code", "strict", is_flag=True, help="Exit with 1 if A and B differ.")
@options.allow
@options.allow_code
@options.output
def diff(
    a: str, b: str, every: bool, strict: bool, allow: tuple[str, ...], allow_code: bool, console: Console
) -> int:
    """Show what differs between two outputs, models or recipes.

    A and B are both recipes, by name or file, or each is a folder of `qtrace calibrate` or `qtrace finetune`,
    a prepared.mge or a quantized.mge. Two models are compared by config, ops, sites, scales, integers of
    weights and biases, and figures: size, MACs, predicted time, and those of the folders' verdicts. Sites are
    paired by name.
    """
    width = shutil.get_terminal_size().columns if on_terminal() else None
    with console.work():
        recipes = [_is_recipe(name) for name in (a, b)]
        if recipes[0] != recipes[1]:
            recipe, model = (a, b) if recipes[0] else (b, a)
            raise click.UsageError(
                f"{recipe} is a recipe and {model} a model: give two recipes, or two models or folders."
            )
        result = _recipes(a, b, allow_code) if recipes[0] else _models(a, b, allow)
    text = f"A: {a}\nB: {b}\n\n{result.table(width, None if every else _ROWS)}"
    console.result(text, {"a": a, "b": b, **result.to_dict()})
    return int(strict and not result.empty)


def _is_recipe(name: str) -> bool:
    """Whether ``name`` is a recipe's file or name, rather than a model or a folder."""
    from qtrace.config.recipe import recipe_names

    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        return True
    return not path.exists() and name in recipe_names()


def _recipes(a: str, b: str, allow_code: bool) -> Difference:
    import qtrace
    from qtrace.inspection.difference import Difference, compare_configs

    first, second = (qtrace.load_recipe(name, allow_code=allow_code) for name in (a, b))
    return Difference(config=compare_configs(first, second))


def _models(a: str, b: str, allow: tuple[str, ...]) -> Difference:
    from qtrace.inspection.difference import compare_models

    loaded = []
    for name in (a, b):
        file = _file(name)
        model = models.load_model(file, allow)
        models.check_stage(model, file)
        loaded.append(model)
    return compare_models(*loaded).with_figures(_verdicts(a, b))


def _file(name: str) -> str:
    """Returns the model file of a folder, or ``name`` itself."""
    if not Path(name).is_dir():
        return name
    file = Path(name) / _MODEL
    if not file.exists():
        raise click.UsageError(f"{name} has no {_MODEL}: give a folder that `qtrace calibrate` has written.")
    return str(file)


def _verdicts(a: str, b: str) -> list[FigurePair]:
    """Returns the measured figures of the verdicts of two folders, as far as they have any."""
    from qtrace.inspection.difference import FigurePair

    names = {"sqnr_db": "output SQNR in dB", "agreement": "same prediction", "metric": "metric"}
    first, second = (_read_verdict(Path(name)) for name in (a, b))
    pairs = [FigurePair(text, first.get(key), second.get(key)) for key, text in names.items()]
    return [pair for pair in pairs if pair.first is not None or pair.second is not None]


def _read_verdict(folder: Path) -> dict[str, float]:
    """Returns the numbers of a folder's verdict by name."""
    file = folder / VERDICT
    if not folder.is_dir() or not file.exists():
        return {}
    try:
        verdict = json.loads(file.read_text(encoding="utf-8"))["verdict"]
        return {k: v for k, v in verdict.items() if isinstance(v, (int, float)) and math.isfinite(v)}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise QtraceError(f"{file} cannot be read ({error}): calibrate again, or delete it.") from error

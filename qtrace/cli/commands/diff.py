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
from qtrace.cli.naming import CONVERTED
from qtrace.errors import QtraceError
from qtrace.quantizing.folder import VERDICT

if TYPE_CHECKING:
    from qtrace.inspection.difference import Difference, FigurePair
    from qtrace.inspection.difference.onnx_files import FileDifference

__all__ = ["diff"]

_ROWS = 20
_FIGURES = {"sqnr_db": "output SQNR in dB", "agreement": "same prediction", "metric": "metric"}  # in verdicts


@click.command(
    cls=help.Command,
    example="""
        qtrace diff monday/ tuesday/
        qtrace diff int8/quantized.mge finetuned/quantized.mge --json
        qtrace diff resnet50 mine.yaml --exit-code
        qtrace diff net.onnx net-int8.onnx
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
    """Show what differs between two outputs, models, recipes or ONNX files.

    A and B are both recipes, by name or file; two .onnx files, which are compared node by node; or each is a
    folder of `qtrace calibrate` or `qtrace finetune`, a prepared.mge or a quantized.mge. Two models are
    compared by config, ops, sites, scales, integers of weights and biases, and figures: size, MACs, predicted
    time, and those of the folders' verdicts. Sites are paired by name. Nodes of .onnx files are paired by
    name or result; the table says which went, which came, and what the others read and run on.
    """
    width = shutil.get_terminal_size().columns if on_terminal() else None
    with console.work():
        files = [models.is_onnx(name) for name in (a, b)]
        recipes = [_is_recipe(name) for name in (a, b)]
        if files[0] != files[1]:
            file, other = (a, b) if files[0] else (b, a)
            raise click.UsageError(
                f"{file} is an ONNX file and {other} is not: give two ONNX files, or export the other one."
            )
        if recipes[0] != recipes[1]:
            recipe, model = (a, b) if recipes[0] else (b, a)
            raise click.UsageError(
                f"{recipe} is a recipe and {model} a model: give two recipes, or two models or folders."
            )
        result: Difference | FileDifference
        if files[0]:
            result = _files(a, b)
        else:
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


def _files(a: str, b: str) -> FileDifference:
    from qtrace.inspection.difference.onnx_files import compare_files

    return compare_files(Path(a), Path(b))


def _recipes(a: str, b: str, allow_code: bool) -> Difference:
    import qtrace
    from qtrace.inspection.difference import Difference, compare_configs

    first, second = (qtrace.load_recipe(name, allow_code=allow_code) for name in (a, b))
    return Difference(config=compare_configs(first, second))


def _models(a: str, b: str, allow: tuple[str, ...]) -> Difference:
    from qtrace.inspection.difference import compare_models

    loaded = []
    for name in (a, b):
        file = models.model_file(name, CONVERTED)
        model = models.load_model(file, allow)
        models.check_stage(model, file)
        loaded.append(model)
    return compare_models(*loaded).with_figures(_verdicts(a, b))


def _verdicts(a: str, b: str) -> list[FigurePair]:
    """Returns the measured figures of the verdicts of two folders, as far as they have any."""
    from qtrace.inspection.difference import FigurePair

    first, second = (_read_verdict(Path(name)) for name in (a, b))
    return [FigurePair(name, first.get(name), second.get(name)) for name in {**first, **second}]


def _read_verdict(folder: Path) -> dict[str, float]:
    """Returns the figures of a folder's verdict by their names in texts, column groups included."""
    file = folder / VERDICT
    if not folder.is_dir() or not file.exists():
        return {}
    try:
        verdict = json.loads(file.read_text(encoding="utf-8"))["verdict"]
        groups = verdict.get("groups", ())
        figures = {text: verdict.get(key) for key, text in _FIGURES.items()}
        if len(groups) > 1:
            figures |= {f"SQNR in dB of {group['name']}": group["sqnr_db"] for group in groups}
        return {k: v for k, v in figures.items() if isinstance(v, (int, float)) and math.isfinite(v)}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise QtraceError(f"{file} cannot be read ({error}): calibrate again, or delete it.") from error

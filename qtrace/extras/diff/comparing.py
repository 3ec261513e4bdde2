"""What differs between two outputs: recipes, models, folders or ONNX files."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Union

from qtrace.config import QConfig
from qtrace.config.recipe import is_recipe_file, load_recipe, recipe_names
from qtrace.errors import ConfigError, GraphError, QtraceError
from qtrace.extras.diff import Difference, FigurePair, compare_configs, compare_models
from qtrace.extras.diff.onnx_files import FileDifference, compare_files
from qtrace.graph.files.serialize import load
from qtrace.graph.types import TracedModule
from qtrace.plugins.options import check_arguments
from qtrace.preparation.record import check_quantized
from qtrace.process import on_engine_thread
from qtrace.quantizing.folder import QUANTIZED, VERDICT
from qtrace.storage.files import parse_document

__all__ = ["diff"]

_FIGURES = {"sqnr_db": "output SQNR in dB", "agreement": "same prediction", "metric": "metric"}  # in verdicts

Side = Union[QConfig, TracedModule, str, "os.PathLike[str]"]


@check_arguments
@on_engine_thread
def diff(
    a: Side, b: Side, *, allow: Sequence[str] = (), allow_code: bool = False
) -> Difference | FileDifference:
    """Shows what differs between two recipes, two models or two ONNX files, as ``qtrace diff`` does.

    Two models are compared by config, ops, sites, scales, integers of weights and biases, and figures; two
    folders by the figures of their verdicts, too. Sites are paired by name. Nodes of ONNX files are paired by
    name or result.

    Args:
        a: a recipe (`QConfig`, name or file), a prepared or converted module, its file, a folder of ``qtrace
            calibrate``, or an ONNX file.
        b: another one of the same kind.
        allow: the user's own classes that the files of models may name.
        allow_code: whether recipes may name code of the user's.

    Returns:
        The differences; ``empty`` where there are none.

    Raises:
        ConfigError: for two things of unlike kinds.
        GraphError: for a model that is not quantized, or a file or folder that holds none.
    """
    kinds = [_kind(side) for side in (a, b)]
    if kinds[0] != kinds[1]:
        raise ConfigError(_unlike(dict(zip(kinds, (a, b), strict=True))))
    if kinds[0] == "file":
        return compare_files(_path(a), _path(b))
    if kinds[0] == "recipe":
        first, second = (_recipe(side, allow_code) for side in (a, b))
        return Difference(config=compare_configs(first, second))
    models = [_model(side, allow) for side in (a, b)]
    return compare_models(*models).with_figures(_verdicts(a, b))


def _path(side: Side) -> Path:
    return Path(os.fspath(side))  # type: ignore[arg-type]


def _kind(side: Side) -> str:
    """Returns ``recipe``, ``model`` or ``file``, for an ONNX file."""
    if isinstance(side, QConfig):
        return "recipe"
    if isinstance(side, TracedModule):
        return "model"
    if not isinstance(side, (str, os.PathLike)):
        raise ConfigError(f"diff takes recipes, modules and paths, not {type(side).__name__}.")
    path = _path(side)
    if path.suffix.lower() == ".onnx":
        return "file"
    if is_recipe_file(path.name) or (not path.exists() and str(side) in recipe_names()):
        return "recipe"
    return "model"


def _unlike(sides: dict[str, Side]) -> str:
    """Says what the two are, and what to give instead."""
    names = {kind: _name(side) for kind, side in sides.items()}
    if "file" in names:
        other = next(name for kind, name in names.items() if kind != "file")
        return (
            f"{names['file']} is an ONNX file and {other} is not: give two ONNX files, or export the "
            "other one."
        )
    return (
        f"{names['recipe']} is a recipe and {names['model']} a model: give two recipes, or two models or "
        "folders."
    )


def _name(side: Side) -> str:
    if isinstance(side, QConfig):
        return "the QConfig"
    return "the module" if isinstance(side, TracedModule) else os.fspath(side)


def _recipe(side: Any, allow_code: bool) -> QConfig:
    return side if isinstance(side, QConfig) else load_recipe(side, allow_code=allow_code)


def _model(side: Any, allow: Sequence[str]) -> TracedModule:
    """Loads a quantized model.

    Raises:
        GraphError: for a folder without one, or a model that is not quantized.
    """
    model, name = side, _name(side)
    if not isinstance(side, TracedModule):
        path = _path(side)
        if path.is_dir() and not (path / QUANTIZED).exists():
            raise GraphError(
                f"{name} is a folder without {QUANTIZED}: give a file, or a folder that `qtrace calibrate` "
                "has written."
            )
        model = load(path / QUANTIZED if path.is_dir() else path, allow=allow)
    check_quantized(model, name)
    return model


def _verdicts(a: Side, b: Side) -> list[FigurePair]:
    """Returns the measured figures of the verdicts of two folders, as far as they have any."""
    first, second = (_read_verdict(side) for side in (a, b))
    return [FigurePair(name, first.get(name), second.get(name)) for name in {**first, **second}]


def _read_verdict(side: Side) -> dict[str, float]:
    """Returns the figures of a folder's verdict by their names in texts, column groups included."""
    file = None if isinstance(side, (QConfig, TracedModule)) else _path(side) / VERDICT
    if file is None or not file.parent.is_dir() or not file.exists():
        return {}
    try:
        verdict = parse_document(file.read_bytes())["verdict"]
        groups = verdict.get("groups", ())
        figures = {text: verdict.get(key) for key, text in _FIGURES.items()}
        if len(groups) > 1:
            figures |= {f"SQNR in dB of {group['name']}": group["sqnr_db"] for group in groups}
        return {k: v for k, v in figures.items() if isinstance(v, (int, float)) and math.isfinite(v)}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise QtraceError(f"{file} cannot be read ({error}): calibrate again, or delete it.") from error

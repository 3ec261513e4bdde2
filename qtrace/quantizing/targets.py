"""Which file a target takes: the suffix of the one call's output, and the target that a suffix stands for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qtrace.config import QConfig, backends
from qtrace.config import recipe as recipes
from qtrace.config.checking import is_precision
from qtrace.config.recipe import as_qconfig
from qtrace.config.rule import FloatType
from qtrace.config.targeting import config_for_target, place_of_target
from qtrace.errors import ConfigError
from qtrace.export import check_case, check_format, formats
from qtrace.quantizing.suffixes import describe_suffixes, suffix_of, target_of, with_suffix

__all__ = ["choose_config", "format_of"]

_ANY_SUFFIX = ("generic", "generic_shift", "generic_w4", "generic_w4a4")  # whose files are for any device


def choose_config(target: str | None, recipe: Any, out: Path, float_type: FloatType | None = None) -> QConfig:
    """Returns the config of a target and a recipe.

    Args:
        target: the name of a backend; None for that of the recipe, or else that of the suffix of ``out``.
        recipe: the config, as for ``qtrace.prepare``; None for the default recipe with this target.
        out: the file to write.
        float_type: the type of what stays float; None for that of the recipe.

    Raises:
        ConfigError: for an unknown target, one that is not the recipe's, or one that takes other files; for
            a folder, and for float16 in a file that has no form of it.
        ExportError: for a suffix that no format has.
    """
    if target is not None:
        backends.get(target)
    if out.is_dir():
        example = out / f"net{suffix_of(target or '')}"
        raise ConfigError(f"{out} is a folder: name a file to write, such as {example}.")
    check_case(out)
    if (bits := _precisions(recipe)) is not None:
        config = _default(bits, target or target_of(out.suffix))
    else:
        config = _with_target(recipe, target, out)
    if float_type is not None:
        config = config.model_copy(update={"float": float_type})
    if config.effective_float == "fp16" and out.suffix != ".onnx":
        place = "" if float_type else f"{config.place('float')}: "
        raise ConfigError(
            f"{place}float: fp16 has a form in .onnx files alone, and {out.name} is none: leave it out."
        )
    own = config.backend in (*backends.packaged(), *formats())
    suffix = suffix_of(config.backend)
    if config.backend in _ANY_SUFFIX or not (own and suffix):
        check_format(out, format_of(config))
    elif out.suffix != suffix:
        if target is None and place_of_target(config) is None:
            raise ConfigError(describe_suffixes(out))
        raise ConfigError(
            f"{out.name} is no file for {config.backend}: name it {with_suffix(out, suffix)}, or give "
            "another target."
        )
    return config


def _precisions(recipe: Any) -> list[str] | None:
    """Returns the precisions of the default recipe that a name asks for; None if it is another recipe."""
    if recipe is None:
        return []
    parts = [part.strip() for part in recipe.split("+")] if isinstance(recipe, str) else [""]
    bits = [part for part in parts if part != recipes.DEFAULT_RECIPE]
    return bits if all(map(is_precision, bits)) else None


def _default(precisions: Sequence[str], name: str | None) -> QConfig:
    """Returns the default recipe, with the bits of precisions, for a target.

    Args:
        precisions: the short names of precisions; none for its own bits.
        name: the name of a backend; None for that of the default recipe.
    """
    parts = [recipes.DEFAULT_RECIPE, *precisions]
    if name in backends.packaged() and name != "onnxruntime":
        return as_qconfig("+".join([*parts, name]))
    config = as_qconfig("+".join(parts))
    return config if name is None else config.model_copy(update={"backend": name})


def _with_target(recipe: Any, target: str | None, out: Path) -> QConfig:
    """Returns the config of a recipe for a target.

    Args:
        recipe: the config, or the name or path of a recipe.
        target: the name of a backend; None for that of the recipe, or else that of the suffix of ``out``.
        out: the file to write.

    Raises:
        ConfigError: when the recipe is for another target.
    """
    config = as_qconfig(recipe)
    place = place_of_target(config)
    name = target or (None if place else target_of(out.suffix))
    if name is None or config.backend == name:
        return config
    if place:
        prefix = "" if place == config.origin else f"{place}: "
        raise ConfigError(
            f"{prefix}the recipe is for {config.backend}, and target says {name}: leave out one of the two."
        )
    return config_for_target(config, name)


def format_of(config: QConfig) -> str | None:
    """Returns the export format of a target's name; None for that of the suffix."""
    return config.backend if config.backend in formats() else None

"""Which file a target takes: the suffix of the one call's output, and the target that a suffix stands for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qtrace.config import QConfig, backends
from qtrace.config.precision import is_precision
from qtrace.config.recipe import as_qconfig, config_or_default
from qtrace.config.rule import FloatType
from qtrace.errors import ConfigError
from qtrace.quantizing.suffixes import suffix_of, target_of

__all__ = ["choose_config", "format_of"]

_OWN_SUFFIXES = ("generic", "generic_shift", "generic_w4", "generic_w4a4")  # whose files are for any device


def choose_config(target: str | None, recipe: Any, out: Path, float_type: FloatType | None = None) -> QConfig:
    """Returns the config of a target and a recipe.

    Args:
        target: the name of a backend; None for that of the recipe, or else that of the suffix of ``out``.
        recipe: the config, as for ``qtrace.prepare``; None for the default one of the target.
        out: the file to write.
        float_type: the type of what stays float; None for that of the recipe.

    Raises:
        ConfigError: for an unknown target, one that is not the recipe's, or one that takes other files; and
            for float16 in a file that has no form of it.
    """
    name = target or (target_of(out.suffix) if recipe is None or is_precision(recipe) else None)
    if name is not None:
        backends.get(name)
    if is_precision(recipe):
        config = as_qconfig(f"{recipe}+{name}" if name in backends.packaged() else str(recipe))
    elif recipe is not None:
        config = as_qconfig(recipe)
        if name is not None and config.backend != name:
            if "backend" in config.model_fields_set:
                raise ConfigError(
                    f"the recipe is for {config.backend}, and target says {name}: leave out one of the two."
                )
            config = config.model_copy(update={"backend": name})
    elif name is None or name == "onnxruntime":
        config = config_or_default(None)
    else:
        config = as_qconfig(f"backend/{name}" if name in backends.packaged() else {"backend": name})
    if float_type is not None:
        config = config.model_copy(update={"float": float_type})
    if config.effective_float == "fp16" and out.suffix != ".onnx":
        place = "" if float_type else f"{config.place('float')}: "
        raise ConfigError(
            f"{place}float: fp16 has a form in .onnx files alone, and {out.name} is none: leave it out."
        )
    suffix = suffix_of(config.backend)
    if config.backend not in _OWN_SUFFIXES and out.suffix != suffix and ":" not in config.backend:
        raise ConfigError(
            f"{out.name} is no file for {config.backend}: name it {out.with_suffix(suffix).name}, or give "
            "another target."
        )
    return config


def format_of(config: QConfig) -> str | None:
    """Returns the export format that the suffix does not say by itself; None for the suffix's."""
    return "megengine" if config.backend == "megengine" else None

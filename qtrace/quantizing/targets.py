"""Which file a target takes: the suffix of the one call's output, and the target that a suffix stands for.

The placement that a user prefers, and the bits of weights, follow by rule, too. Without VNNI instructions,
onnxruntime's kernels for uint8 and int8 add two products in 16 bits. Weights of 8 bits are stored as uint8
there, whose kernels are exact and slower. Two products with weights of 7 bits fit, so that these take the
fast kernels, which a config that asks for speed gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qtrace.config import QConfig, Rule, SchemePatch, backends
from qtrace.config import recipe as recipes
from qtrace.config.checking import is_precision
from qtrace.config.recipe import as_qconfig
from qtrace.config.rule import FloatType
from qtrace.config.written import config_for_target, place_of_target
from qtrace.errors import ConfigError
from qtrace.export import check_case, find_format, format_by_name, formats
from qtrace.onnxfile.kernels import SAFE_BITS, products_saturate
from qtrace.preparation.annotation import Preference
from qtrace.runtimes.host import RuntimeHost


def suffix_of(backend: str) -> str:
    """Returns the suffix of the files for a backend: the one of the format with its name, or ``.onnx``."""
    return next(iter(format_by_name(backend).suffixes), "") if backend in formats() else ".onnx"


def with_suffix(out: Path, suffix: str) -> str:
    """Returns a name with another suffix, in the place of a format's, too, as in ``net.tflite.gz``."""
    stem = Path(out.stem)
    return (stem.stem if stem.suffix in _suffixes().values() else stem.name) + suffix


def describe_suffixes(out: Path) -> str:
    """Says that no target takes a file by its name, and which suffixes they take."""
    targets: dict[str, list[str]] = {}
    for name, suffix in _suffixes().items():
        targets.setdefault(suffix, []).append(name)
    known = ", ".join(f"{suffix} ({', '.join(names)})" for suffix, names in sorted(targets.items()))
    what = f"the suffix {out.suffix}, which no target takes" if out.suffix else "no suffix"
    return f"{out.name} has {what}: name the file with one of {known}."


def target_of(suffix: str) -> str | None:
    """Returns the only backend that takes files of a suffix; None for a suffix that several take."""
    owners = [backend for backend, own in _suffixes().items() if own == suffix]
    return owners[0] if len(owners) == 1 else None


def _suffixes() -> dict[str, str]:
    """Returns the suffix of the files of each target; packages do not add to the suffixes of qtrace's own."""
    own = {backend: suffix_of(backend) for backend in backends.packaged()}
    others = {backend: suffix_of(backend) for backend in backends.known() if backend not in own}
    return own | {backend: suffix for backend, suffix in others.items() if suffix not in own.values()}


_ORIGIN = "weights of 7 bits"


def prefer_placement(config: QConfig, prefer: Preference | None) -> QConfig:
    """Returns the config with a placement that leaves the choice which a preference makes."""
    if prefer is None:
        return config
    return config.model_copy(update={"placement": "fastest" if prefer == "speed" else "balanced"})


def with_safe_bits(config: QConfig, host: RuntimeHost | None = None) -> QConfig:
    """Returns the config with weights of 7 bits if it asks for speed, and products of 8 bits saturate here.

    Args:
        config: the config.
        host: the interpreter or machine that has the runtime; None for this one.
    """
    fewer = with_fewer_bits(config) if config.effective_placement in ("balanced", "fastest") else None
    return config if fewer is None or not products_saturate(host) else fewer


def with_fewer_bits(config: QConfig) -> QConfig | None:
    """Returns a config with weights of 7 bits; None if it says itself what weights are, or has other kernels.

    Depthwise convolutions' weights keep 8 bits: their kernels do not add in 16 bits.

    Args:
        config: the config, of whatever target.
    """
    says = [config.weight, *(rule.weight for rule in config.rules)]
    methods = {config.method or "static", *(rule.method or "static" for rule in config.rules)}
    if config.backend != "onnxruntime" or any(says) or methods != {"static"}:
        return None
    if _has_other_activations(config):
        return None
    match = {"op": "conv2d", "depthwise": True}
    depthwise = Rule.model_validate({"match": match, "weight": {"bits": 8}, "optional": True})
    rules = (depthwise.with_origin(_ORIGIN), *config.rules)
    changes: dict[str, Any] = {"weight": SchemePatch(bits=SAFE_BITS), "rules": rules}
    return config.model_copy(update=changes)


def _has_other_activations(config: QConfig) -> bool:
    """Whether an activation is not uint8: only products with uint8 saturate."""
    patches = (config.activation, *(p for r in config.rules for p in (r.activation, r.output)))
    return any(
        patch is not None and (patch.bits or 8, patch.signed or False) != (8, False) for patch in patches
    )


_ANY_SUFFIX = ("generic", "generic_shift", "generic_w4", "generic_w4a4")  # whose files are for any device


def choose_config(target: str | None, recipe: Any, out: Path, float_type: FloatType | None = None) -> QConfig:
    """Returns the config of a target and a recipe.

    Args:
        target: the name of a backend; None for the recipe's, or else the one of the suffix of ``out``.
        recipe: the config, as for ``qtrace.prepare``; None for the default recipe with this target.
        out: the file to write.
        float_type: the type of what stays float; None for the recipe's.

    Raises:
        ConfigError: for an unknown target, one that is not the recipe's, or one that takes other files; for
            a folder, and for float16 in a file without a form of it.
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
            f"{place}float: fp16 has a form only in .onnx files, and {out.name} is none: leave it out."
        )
    own = config.backend in (*backends.packaged(), *formats())
    suffix = suffix_of(config.backend)
    if config.backend in _ANY_SUFFIX or not (own and suffix):
        find_format(out, format_of(config))
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
        name: the name of a backend; None for the default recipe's.
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
        target: the name of a backend; None for the recipe's, or else the one of the suffix of ``out``.
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
    """Returns the export format of a target's name; None for the suffix's."""
    return config.backend if config.backend in formats() else None

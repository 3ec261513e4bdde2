"""Recipes: a config as a YAML file. Packaged ones are named by their file in ``recipes/``: ``backend/ncnn``.

A file begins with ``schema: qtrace/1``. Its other keys are fields of `QConfig`, and ``imports``: a list of
packaged names, and paths relative to the file. Imported files come first and the importing file wins:
mappings merge by key, rules are appended, anything else (lists, a plugin with its options) is replaced. A
file that is imported twice counts once, at its first import. ``..`` may stand in a path, as a recipe is read,
never run. An absolute path may not, as it fits one machine only.

Packaged names that are joined by ``+`` are one recipe, ``vit+tensorrt``: a file that imports them, its
targets last. There a target is named without ``backend/``, too.

A recipe that names code (``pkg.mod:Class``) is refused unless the caller allows it: using a class runs its
module.
"""

from __future__ import annotations

import difflib
import inspect
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megengine.quantization import QConfig as NativeConfig
from megengine.quantization.utils import QuantMode

from qtrace.config import QConfig, backends
from qtrace.config.checking import SYMMETRIC, check_precision, is_precision, lacks_zero_points
from qtrace.config.rule import specs
from qtrace.config.tree import MOST_LEVELS, Tree, dump, merge, plant, read
from qtrace.errors import ConfigError
from qtrace.plugins.options import OptionModel, check_arguments
from qtrace.scheme import QScheme

# MegEngine's own quantization configs, said in the words of qtrace's.

# A class of MegEngine's -> the observer or the fake quant of qtrace that does the same.
_OBSERVERS = {
    "MinMaxObserver": "minmax",
    "SyncMinMaxObserver": "minmax",
    "ExponentialMovingAverageObserver": "moving_average",
    "SyncExponentialMovingAverageObserver": "moving_average",
    "HistogramObserver": "mse",
}
_FAKE_QUANTS = {"NoneType": "fixed", "FakeQuantize": "fixed", "TQT": "tqt", "LSQ": "lsq"}


def describe_equivalent(config: Any) -> tuple[dict[str, Any], list[str]]:
    """Returns the fields of the `QConfig` that rounds and observes as ``config`` does, or nearly so.

    Args:
        config: a config of MegEngine's.

    Returns:
        The fields, and a clause for each part without an equal.
    """
    schemes: dict[str, QScheme] = {}
    observers: dict[str, Any] = {}
    fake_quants: dict[str, str] = {}
    lost: list[str] = []
    parts = {
        "activation": (config.act_observer, config.act_fake_quant),
        "weight": (config.weight_observer, config.weight_fake_quant),
    }
    for side, (make_observer, make_fake_quant) in parts.items():
        try:
            observer, fake_quant = (make and make() for make in (make_observer, make_fake_quant))
        except Exception as error:
            raise ConfigError(f"MegEngine's QConfig has parts of {side}s that fail: {error}.") from error
        if observer is None and fake_quant is None:
            continue
        kind = type(fake_quant).__name__
        fake_quants[side] = _FAKE_QUANTS.get(kind, "fixed")
        lost += [] if kind in _FAKE_QUANTS else [f"{kind} of {side}s"]
        schemes[side] = _scheme(side, observer, fake_quant, lost)
        observers |= _observer(side, observer, lost)
    learning = set(fake_quants.values()) - {"fixed"}
    fakequant = learning.pop() if len(set(fake_quants.values())) == len(learning) == 1 else "fixed"
    lost += [
        f"{name} of {side}s only" for side, name in fake_quants.items() if name not in ("fixed", fakequant)
    ]
    if fakequant == "tqt":
        schemes = {side: scheme.replace(power_of_two=True) for side, scheme in schemes.items()}
        lost.append("TQT with scales that are no powers of two")
    lost += [] if "weight" in schemes else ["weights in float"]
    int8 = backends.get("megengine").weight
    on_int8 = {side: scheme.replace(narrow=False) for side, scheme in schemes.items() if side == "weight"}
    fields: dict[str, Any] = {
        "backend": "megengine" if {**schemes, **on_int8} == dict.fromkeys(parts, int8) else "generic"
    }
    backend = backends.get(fields["backend"])
    defaults = {"activation": backend.activation.to_dict(), "weight": backend.weight.to_dict()}
    for side, scheme in schemes.items():
        patch = {key: value for key, value in scheme.to_dict().items() if value != defaults[side][key]}
        fields |= {side: patch} if patch else {}
    fields |= {"method": "weight_only"} if [*schemes] == ["weight"] else {}
    fields |= {"observers": observers} if observers else {}
    learned = {"tqt": "tqt", "lsq": {"lsq": {"grad_scale": False}}}
    return fields | ({"fakequant": learned[fakequant]} if fakequant in learned else {}), lost


def _scheme(side: str, observer: Any, fake_quant: Any, lost: list[str]) -> QScheme:
    """Returns the scheme of a side; adds what lacks an equal to ``lost``."""
    dtype = (fake_quant or observer).dtype
    if dtype != (observer or fake_quant).dtype:
        lost.append(f"{side}s that are observed as {observer.dtype.name} and rounded as {dtype.name}")
    low, high = int(dtype.qmin), int(dtype.qmax)
    signed, affine = low < 0, getattr(observer, "mode", None) is QuantMode.ASYMMERTIC
    scheme = QScheme(
        bits=min(max(high.bit_length() + signed, 2), 16),
        signed=signed,
        symmetric=signed and not affine,
        narrow=signed and low == -high,
        rounding="half_away",
    )
    if (scheme.qmin, scheme.qmax) != (low, high):
        lost.append(f"{side}s with integers from {low} to {high}")
    if not affine and not signed:
        lost.append(f"{side}s whose zero point is 0 whatever they hold")
    elif not affine and not scheme.narrow and observer is not None:
        lost.append(f"the scale of {side}s, the largest value / {(high - low) / 2:g} there, / {high} here")
    return scheme


def _observer(side: str, observer: Any, lost: list[str]) -> dict[str, Any]:
    """Returns the observer of a side, if it has an equal or a near one; adds what lacks one to ``lost``."""
    kind = type(observer).__name__
    if kind not in _OBSERVERS:
        lost.append(f"{side}s without an observer" if observer is None else f"{kind} of {side}s")
        return {}
    name, options = _OBSERVERS[kind], {}
    if observer.scale_limit != inspect.signature(type(observer)).parameters["eps"].default:
        lost.append(f"the least scale of {side}s, {observer.scale_limit:g}")
    if name == "mse":
        lost.append(f"the search of HistogramObserver for {side}s")
        options = {"bins": observer.bins}
    elif name == "moving_average":
        options = {"momentum": float(f"{float(observer.momentum.numpy()):g}")}
    return {side: {name: options} if options else name}


SCHEMA = "qtrace/1"
# The recipe of `prepare(traced)` and of `qtrace calibrate` without one.
DEFAULT_RECIPE = "int8"

_HOME = Path(__file__).parent.parent / "recipes"
_SHOWN_HOME = "qtrace/recipes/"  # the same in messages
_TARGETS = "backend"  # the folder of the targets
_SUFFIXES = (".yaml", ".yml")
_NAME = re.compile(r"\w+(/\w+)*")
_MAX_BYTES = 1 << 20
_MAX_FILES = 200

WHOLE = frozenset(
    {("observers", "activation"), ("observers", "weight"), ("fakequant",), ("qat", "fakequant")}
)
"""Plugins with their options, which are not merged with another plugin's."""

# Keys whose lines `prepare` may report.
_REPORTED_KEYS = (
    "activation",
    "weight",
    "observers.activation",
    "observers.weight",
    "fakequant",
    "qat.fakequant",
    "method",
    "float",
    "placement",
    "region",
    "cost_table",
)


@dataclass(frozen=True)
class Sources:
    """What a config was read from, by which it can be read again for a target.

    Attributes:
        tree: the recipe with its imports merged.
        named: the packaged recipes that the user's files name, each with the place of its name.
        files: the files that were read, by their real paths.
        name: the name of a packaged recipe, or names joined by ``+``; None for a file or a mapping.
    """

    tree: Tree
    named: tuple[tuple[str, str], ...]
    files: frozenset[Path]
    name: str | None


@check_arguments
def load_recipe(name_or_path: str | Path, *, allow_code: bool = False) -> QConfig:
    """Reads a recipe.

    Args:
        name_or_path: the name of a packaged recipe, names joined by ``+`` such as ``vit+tensorrt``, or the
            path of a ``.yaml`` or ``.yml`` file.
        allow_code: whether the recipe and its imports may name classes of your own, ``pkg.mod:Class``. Using
            them runs their modules: allow it for recipes that you trust.

    Returns:
        The config; the origin of each rule is its file and line.

    Raises:
        ConfigError: with one line for each mistake, ``FILE:LINE: ...``.
    """
    return read_recipe(name_or_path, allow_code)[0]


def read_recipe(name_or_path: str | Path, allow_code: bool = False) -> tuple[QConfig, Tree, dict[str, str]]:
    """Returns the config, the merged tree, and the text of each file; reads them as `load_recipe` does."""
    if not isinstance(name_or_path, (str, Path)):
        raise ConfigError(f"a recipe is named by text or a path, not by {type(name_or_path).__name__}.")
    reading = RecipeReader()
    parts = _parts(name_or_path)
    tree = reading.joined(os.fspath(name_or_path), parts) if parts else reading.file(_find(name_or_path))
    tree = reading.completed(tree)
    config, tree = config_of(tree, reading, allow_code)
    check_precision(parts, config.backend)
    name = str(name_or_path) if is_packaged(name_or_path) else None
    named = reading.named if parts or name is None else [(name, config.origin)]
    sources = Sources(tree, tuple(named), frozenset(reading.files), name)
    return config.with_sources(sources), tree, reading.texts


def config_of(tree: Tree | None, reading: RecipeReader, allow_code: bool) -> tuple[QConfig, Tree]:
    """Returns the config of what was read, and the same as a tree that is there.

    Raises:
        ConfigError: with one line for each mistake.
    """
    problems = reading.problems
    config = None
    if tree is not None:
        try:
            config = QConfig.model_validate(tree.plain(), place=tree.place)
        except ConfigError as error:
            # One sentence per line: the first says why it cannot be read.
            reported = {_line(problem) for problem in problems}
            problems += [text for text in str(error).split("\n") if _line(text) not in reported]
    if config is not None and tree is not None and not allow_code:
        problems += _named_code(config, tree)
    if config is None or tree is None or problems:
        raise ConfigError("\n".join(problems))
    rules = tree.value["rules"].value if "rules" in tree.value else None
    trees = {key: tree.find(tuple(key.split("."))) for key in _REPORTED_KEYS}
    places: dict[str, str] = {}
    listed = tree.value["ptq"].value if "ptq" in tree.value else None
    named = {**trees, **{f"ptq[{index}]": item for index, item in enumerate(listed or ())}}
    for key, child in named.items():
        if child is not None and child.line:
            places[key] = child.origin
            places.update(_option_places(key, child))
    origins = [rule.origin if rule.line else rule.path for rule in rules or ()]
    return config.with_origin(tree.file, origins, places), tree


def _line(sentence: str) -> str:
    """Returns ``FILE:LINE`` of a sentence about a recipe, else the sentence."""
    line = re.match(r".+?:\d+(?=: )", sentence)
    return line[0] if line else sentence


def _named_code(config: QConfig, tree: Tree) -> list[str]:
    """Writes a sentence for each class of the user, and for the user's backend, that a recipe names."""
    sentences = []
    for loc, name in (*((loc, spec.name) for loc, spec in specs(config)), (("backend",), config.backend)):
        if ":" in name and ((written := tree.find(loc)) is None or written.line):
            prefix, path = tree.place(loc)
            sentences.append(
                f"{prefix}{path} names code, {name!r}, which would be run: if you trust this recipe, "
                "allow it with --allow-code, in Python with load_recipe(..., allow_code=True)."
            )
    return sentences


def _option_places(key: str, plugin: Tree) -> Iterator[tuple[str, str]]:
    """Yields each option of a plugin, such as ``ptq[1].iterations``, with its ``FILE:LINE``."""
    for child in plugin.value.values() if isinstance(plugin.value, dict) else ():
        for option, value in child.value.items() if isinstance(child.value, dict) else ():
            yield f"{key}.{option}", value.origin


def as_qconfig(obj: QConfig | str | Path | Mapping[str, Any]) -> QConfig:
    """Converts a mapping, or the name or path of a recipe, to a config; returns a config unchanged.

    A mapping may have ``imports``, as a recipe file has; their paths are relative to the working directory.
    Unlike a mapping, a recipe may not name code, see `load_recipe`.

    Raises:
        ConfigError: when ``obj`` is none of these, or has mistakes.
    """
    if isinstance(obj, QConfig):
        return obj
    if isinstance(obj, (str, Path)):
        return load_recipe(obj)
    if isinstance(obj, Mapping):
        return _read_mapping(obj) if {"imports", "schema"} & set(obj) else QConfig.model_validate(dict(obj))
    raise ConfigError(_describe_wrong(obj))


def _read_mapping(mapping: Mapping[str, Any]) -> QConfig:
    """Reads a mapping with the keys of a recipe file, as `load_recipe` reads the file."""
    reading = RecipeReader()
    tree = reading.completed(reading.mapping(mapping))
    config, tree = config_of(tree, reading, allow_code=False)
    return config.with_sources(Sources(tree, tuple(reading.named), frozenset(reading.files), None))


def _describe_wrong(obj: object) -> str:
    """Returns what to give instead of ``obj``, which is no config."""
    if isinstance(obj, NativeConfig):
        fields, lost = describe_equivalent(obj)
        words = "the nearest" if lost else "the same"
        without = f" It has no equal of {'; '.join(lost)}." if lost else ""
        return (
            f"expected a QConfig of qtrace's, not one of MegEngine's own: {words} in its words is {fields}, "
            f"a mapping that you can give instead.{without}"
        )
    return f"expected a QConfig, a mapping, or a recipe's name or path, not {type(obj).__name__}."


def config_or_default(obj: QConfig | str | Path | Mapping[str, Any] | None) -> QConfig:
    """Does what `as_qconfig` does; None, and a config or mapping that says nothing, mean the default recipe.

    Raises:
        ConfigError: as `as_qconfig`.
    """
    config = None if obj is None else as_qconfig(obj)
    if config is None or (not isinstance(obj, (str, Path)) and not config.model_fields_set):
        return load_recipe(DEFAULT_RECIPE)
    return config


def recipe_names() -> tuple[str, ...]:
    """Lists the names of the packaged recipes, sorted: ``resnet50``, ``backend/ncnn``."""
    return tuple(sorted(_name(path) for path in _HOME.rglob("*.yaml")))


def is_recipe_file(name: str) -> bool:
    """Returns whether ``name`` names a recipe file, which ends with .yaml or .yml in any case."""
    return name.lower().endswith(_SUFFIXES)


def importable(name: str, folder: Path) -> str:
    """Returns the name by which a file in ``folder`` imports a recipe: a file's path is relative to it."""
    return Path(os.path.relpath(name, folder)).as_posix() if is_recipe_file(name) else name


def is_packaged(recipe: object) -> bool:
    """Returns whether ``recipe`` is the name of a packaged recipe, or names joined by ``+``."""
    if not isinstance(recipe, str) or is_recipe_file(recipe):
        return False
    names = recipe_names()
    return all(_packaged(part, names) is not None for part in _split(recipe))


def dump_recipe(qconfig: QConfig) -> str:
    """Writes the settings of ``qconfig`` as the text of a recipe file, without imports and comments."""
    return dump({"schema": SCHEMA, **qconfig.to_dict()})


def _name(path: Path) -> str:
    return path.relative_to(_HOME).with_suffix("").as_posix()


def _parts(name_or_path: str | Path) -> list[str]:
    """Returns the packaged names that are joined by ``+``; [] where the recipe is no such text.

    Targets come after families, and precisions last: ``w8a16`` says only the bits. By itself it is for the
    default target.

    Raises:
        ConfigError: when a part is no packaged recipe.
    """
    if is_precision(name_or_path) and str(name_or_path) in recipe_names():
        name_or_path = f"{DEFAULT_RECIPE}+{name_or_path}"
    if not isinstance(name_or_path, str) or "+" not in name_or_path or is_recipe_file(name_or_path):
        return []
    names = recipe_names()
    parts = []
    for part in _split(name_or_path):
        name = _packaged(part, names)
        if name is None:
            raise ConfigError(_describe_unknown(name_or_path, part, names))
        parts.append(name)
    parts = sorted(parts, key=lambda name: (is_precision(name), _is_target(name, names)))
    target = next((name.rpartition("/")[2] for name in parts if _is_target(name, names)), "")
    if target in backends.packaged() and any(
        lacks_zero_points(name, target) for name in filter(is_precision, parts)
    ):
        parts.append(SYMMETRIC)
    return parts


def _split(text: str) -> list[str]:
    """Returns the names that are joined by ``+``."""
    return [part.strip() for part in text.split("+")]


def _packaged(part: str, names: Sequence[str]) -> str | None:
    """Returns the packaged recipe that a part of a name means; None if there is none."""
    return next((name for name in (part, f"{_TARGETS}/{part}") if name in names), None)


def _is_target(name: str, names: Sequence[str]) -> bool:
    """Returns whether a packaged recipe is a target's, or the short name of one next to the families."""
    return name.startswith(f"{_TARGETS}/") or f"{_TARGETS}/{name}" in names


def _describe_unknown(text: str, part: str, names: Sequence[str]) -> str:
    """Says that a part of ``text`` is no packaged recipe, and which there are."""
    targets = [name.removeprefix(f"{_TARGETS}/") for name in names if name.startswith(f"{_TARGETS}/")]
    plain = [name for name in names if "/" not in name and not _is_target(name, names)]
    near = difflib.get_close_matches(part, [*plain, *targets], n=1)
    advice = f"did you mean {near[0]!r}?" if near else "a file of yours imports what it builds on instead."
    return (
        f"{text!a}: there is no recipe {part!a}; {advice} Targets are {', '.join(targets)}; the others are "
        f"{', '.join(plain)}."
    )


def _find(name_or_path: str | Path, base: Path = Path()) -> Path:
    """Finds the file of a packaged recipe, or of a path relative to ``base``."""
    text = os.fspath(name_or_path)
    try:
        possible = b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:  # half of a pair of surrogates
        possible = False
    if not possible:
        raise ConfigError(f"{text!a} cannot be the name of a file.")
    if is_recipe_file(text):
        return base / text
    packaged = _HOME / f"{text}.yaml"
    if isinstance(name_or_path, str) and _NAME.fullmatch(text) and packaged.is_file():
        return packaged
    folders = {name.partition("/")[0] for name in recipe_names() if "/" in name}
    if isinstance(name_or_path, Path) or ("/" in text and text.partition("/")[0] not in folders):
        raise ConfigError(f"{text}: the name of a recipe file ends with .yaml or .yml.")
    near = _similar(text)
    advice = f"did you mean {near!r}?" if near else "`qtrace recipes list` shows those there are."
    raise ConfigError(f"there is no recipe {text!r}; {advice} A file ends with .yaml.")


def _similar(text: str) -> str:
    """Finds the packaged recipe whose name resembles ``text``; "" for none."""
    names = recipe_names()
    last = text.rpartition("/")[2]
    same = [name for name in names if last and name.rpartition("/")[2] == last]
    return next(iter(same or difflib.get_close_matches(text, names, n=1)), "")


def _shown(path: Path) -> str:
    """Returns a file's name for messages, which is the same on every machine for packaged recipes."""
    packaged = path.is_relative_to(_HOME)
    return f"{_SHOWN_HOME}{path.relative_to(_HOME).as_posix()}" if packaged else os.path.normpath(path)


class RecipeReader:
    """Reads one recipe with its imports.

    Attributes:
        problems: the mistakes, one sentence each.
        texts: the text of each file.
        files: the files that were read, by their real paths.
        named: the packaged recipes that the user's files name, each with the place of its name.
    """

    def __init__(self, files: Iterable[Path] = ()) -> None:
        self.problems: list[str] = []
        self.texts: dict[str, str] = {}
        self.files = set(files)
        self.named: list[tuple[str, str]] = []
        self._open: list[tuple[Path, str]] = []
        self._full = False

    def file(self, path: Path, importer: str = "") -> Tree | None:
        """Merges a file and its imports; None if it cannot be read, or was read before."""
        shown, real = _shown(path), Path(os.path.realpath(path))
        names = [name for file, name in self._open if file == real]
        if names:
            way = " -> ".join([name for _, name in self._open] + [shown])
            self.problems.append(f"{importer}the imports go in a circle: {way}.")
            return None
        if real in self.files or self._is_full(importer):
            return None
        self.files.add(real)
        try:
            text = _text(path, shown)
        except ConfigError as error:
            self.problems.append(f"{importer}{error}")
            return None
        self.texts[shown] = text
        tree = read(text, shown, self.problems)
        if tree is None or not self._is_recipe(tree):
            return None
        self._open.append((real, shown))
        tree = self._with_imports(tree, path)
        self._open.pop()
        return tree

    def packaged(self, name: str) -> Tree | None:
        """Merges a packaged recipe and its imports; None if it was read before."""
        return self.file(_HOME / f"{name}.yaml")

    def completed(self, tree: Tree | None) -> Tree | None:
        """Puts the default beneath a recipe that imports only precisions: they say only the bits."""
        names = [name for name, _ in self.named]
        if tree is None or not names or not all(map(is_precision, names)) or "backend" in tree.value:
            return tree
        self.named.append((DEFAULT_RECIPE, tree.origin))
        default = self.packaged(DEFAULT_RECIPE)
        return tree if default is None else _on_top(default, tree)

    def mapping(self, mapping: Mapping[str, Any]) -> Tree | None:
        """Merges a mapping of Python with its imports; None if its schema is another one."""
        options = {k: v.to_dict() if isinstance(v, OptionModel) else v for k, v in mapping.items()}
        tree = plant({"schema": SCHEMA, **options}, QConfig.__name__)
        return self._with_imports(tree, Path()) if self._is_recipe(tree) else None

    def joined(self, name: str, parts: Sequence[str]) -> Tree | None:
        """Merges packaged recipes as a file ``name`` does that imports them."""
        description = " + ".join(parts)
        text = f"schema: {SCHEMA}\ndescription: {description}\nimports: [{', '.join(parts)}]\n"
        self.texts[name] = text
        tree = read(text, name, self.problems)
        return None if tree is None else self._with_imports(tree, Path())

    def _is_full(self, importer: str) -> bool:
        """Whether the recipe has as many files as allowed; adds one problem if so."""
        reason = ""
        if len(self._open) >= MOST_LEVELS:
            reason = f"imports stand more than {MOST_LEVELS} levels below each other"
        elif len(self.files) >= _MAX_FILES:
            reason = f"the recipe has more than {_MAX_FILES} files"
        if reason and not self._full:
            self.problems.append(f"{importer}{reason}: put what belongs together into one file.")
            self._full = True
        return bool(reason)

    def _is_recipe(self, tree: Tree) -> bool:
        """Whether ``tree`` is a mapping of schema `SCHEMA`; adds a problem if not."""
        if not isinstance(tree.value, dict):
            self.problems.append(f"{tree.origin}: a recipe is a mapping that begins with 'schema: {SCHEMA}'.")
            return False
        schema = tree.value.get("schema")
        if schema is None:
            self.problems.append(f"{tree.origin}: 'schema: {SCHEMA}' is missing; a recipe begins with it.")
        elif schema.value != SCHEMA:
            self.problems.append(
                f"{schema.origin}: schema {schema.plain()!r} is not supported; this version reads {SCHEMA!r}."
            )
        return schema is not None and schema.value == SCHEMA

    def _with_imports(self, tree: Tree, path: Path) -> Tree:
        values = {key: child for key, child in tree.value.items() if key not in ("schema", "imports")}
        result: Tree | None = None
        for imported in self._imports(tree, path):
            result = imported if result is None else _on_top(result, imported)
        own = replace(tree, value=values)
        return own if result is None else _on_top(result, own)

    def _imports(self, tree: Tree, path: Path) -> list[Tree]:
        imports = tree.value.get("imports")
        if imports is None or imports.value is None:
            return []
        if not isinstance(imports.value, list):
            self.problems.append(f"{imports.origin}: imports must be a list of recipe names and paths.")
            return []
        if len(imports.value) > _MAX_FILES:
            self.problems.append(
                f"{imports.origin}: imports lists {len(imports.value)} recipes; a file may import at most "
                f"{_MAX_FILES}."
            )
            return []
        trees = []
        for item in imports.value:
            if not isinstance(item.value, str):
                self.problems.append(f"{item.origin}: {item.path} must be a recipe's name or path.")
                continue
            if item.line and Path(item.value).is_absolute():
                self.problems.append(
                    f"{item.origin}: {item.path} is the absolute path {item.value!r}: name the file relative "
                    "to this one, so that it is found on every machine."
                )
                continue
            try:
                file = _find(item.value, path.parent)
            except ConfigError as error:
                self.problems.append(f"{item.origin}: {error}")
                continue
            if file.is_relative_to(_HOME) and not path.is_relative_to(_HOME):
                self.named.append((_name(file), item.origin))
            imported = self.file(file, f"{item.origin}: ")
            if imported is not None:
                trees.append(imported)
        return trees


def is_own(tree: Tree) -> bool:
    """Returns whether a value was written in a file of the user's."""
    return not tree.file.startswith(_SHOWN_HOME)


def _on_top(base: Tree, over: Tree) -> Tree:
    merged = merge(base, over, WHOLE)
    first, second = base.value.get("rules"), over.value.get("rules")
    if first is not None and second is not None:
        wrong = [tree for tree in (first, second) if not isinstance(tree.value, (list, type(None)))]
        both = replace(second, value=[*(first.value or ()), *(second.value or ())]) if not wrong else wrong[0]
        merged.value["rules"] = both  # what is no list stays, for validation to refuse
    return merged


def _text(path: Path, shown: str) -> str:
    """Reads the text of a file.

    Raises:
        ConfigError: when it cannot be read as text.
    """
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{shown}: this is not a file.")
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        name = _similar(path.with_suffix("").as_posix()) or _similar(path.stem)
        packaged = f" The packaged recipe is called {name!r}." if name else ""
        raise ConfigError(f"{shown}: there is no such file.{packaged}") from None
    except OSError as error:
        raise ConfigError(f"{shown}: the file cannot be read: {error.strerror}.") from None
    if len(data) > _MAX_BYTES:
        raise ConfigError(f"{shown}: the file is larger than {_MAX_BYTES >> 20} MiB; recipes are not.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{shown}:{line}: the file is not UTF-8 text.") from None

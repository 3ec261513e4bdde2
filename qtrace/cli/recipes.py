"""The command ``qtrace recipes``, with the text of a new recipe and what its rules match."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qtrace.cli import models, options
from qtrace.cli.console import Console
from qtrace.storage.outputs import output_file

if TYPE_CHECKING:
    from qtrace.config import QConfig
    from qtrace.graph.types import TracedModule

__all__ = ["RuleMatch", "match_rules", "recipes", "split_location", "starter", "table"]

_LOCATED = re.compile(r"(?P<file>.+?):(?P<line>\d+): (?P<message>.*)", re.DOTALL)


@dataclass(frozen=True)
class RuleMatch:
    """A rule and the ops that it matches.

    Attributes:
        origin: the location of the rule, such as ``my.yaml:12``.
        match: the conditions of the rule, as plain data.
        changes: the settings that the rule changes, as plain data.
        ops: the names of the ops, in graph order.
        states: the number of these ops by how they are computed.
        passed_over: the targets of the rule, if the recipe's target is not among them.
        optional: whether the rule may match no op.
    """

    origin: str
    match: Any
    changes: Any
    ops: tuple[str, ...]
    states: dict[str, int]
    passed_over: tuple[str, ...] = ()
    optional: bool = False

    @property
    def problem(self) -> str:
        """The mistake in a sentence; "" if there is nmatch."""
        if self.ops or self.optional or self.passed_over:
            return ""
        return (
            f"{self.origin}: the rule for {_flow(self.match)} matches no op of this model: fix it, drop it, "
            "or say optional: true."
        )

    def to_dict(self) -> dict[str, Any]:
        """Converts the match to plain data."""
        return {
            "origin": self.origin,
            "match": self.match,
            "changes": self.changes,
            "ops": list(self.ops),
            "states": self.states,
            "passed_over": bool(self.passed_over),
            "optional": self.optional,
        }


def match_rules(traced: TracedModule, qconfig: QConfig) -> tuple[RuleMatch, ...]:
    """Matches each rule of ``qconfig`` with the ops of a traced module, in the order of the rules.

    Raises:
        QtraceError: when `prepare` would refuse the module for another reason than a rule without ops.
    """
    from qtrace.preparation.prepare import plan

    tolerant = tuple(rule.model_copy(update={"optional": True}) for rule in qconfig.rules)
    notes = plan(traced, qconfig.model_copy(update={"rules": tolerant})).notes
    matches = []
    for rank, rule in enumerate(qconfig.rules):
        matched = [note for note in notes if rank in note.ranks]
        changes = {k: v for k, v in rule.to_dict().items() if k not in ("match", "optional", "backends")}
        others = () if rule.backends is None or qconfig.backend in rule.backends else rule.backends
        names, states = tuple(n.name for n in matched), dict(Counter(n.state for n in matched))
        matches.append(
            RuleMatch(rule.origin, rule.match.to_dict(), changes, names, states, others, rule.optional)
        )
    return tuple(matches)


def table(matches: Sequence[RuleMatch]) -> str:
    """Formats ``matches`` as a table with one row per rule."""
    from qtrace.display import format_table
    from qtrace.errors import shorten_list

    rows = []
    for match in matches:
        ops = shorten_list(match.ops)
        if match.passed_over:
            ops = f"not for this target, only for {', '.join(match.passed_over)}"
        states = ", ".join(f"{count} {state}" for state, count in match.states.items())
        rows.append((match.origin, _flow(match.match), _flow(match.changes), len(match.ops), states, ops))
    return format_table(("rule", "match", "changes", "ops", "computed", "which"), rows, max_width=180)


def _flow(data: Any) -> str:
    from qtrace.config.tree import dump

    return dump([data], flow=True).strip()[1:-1]


def split_location(sentence: str) -> dict[str, Any] | None:
    """Splits ``FILE:LINE: message`` into its parts; None for a sentence without a location."""
    parts = _LOCATED.fullmatch(sentence)
    if parts is None:
        return None
    return {"file": parts["file"], "line": int(parts["line"]), "message": parts["message"]}


_TEXT = string.Template("""\
schema: $schema
$name
# A later import wins over an earlier one, and this file wins over all: first a target, then a family.
# `qtrace recipes show` prints what a file and its imports say, with the reasons, and `qtrace recipes check`
# what is wrong; with --model it also tells which rule meets which ops.
imports: $imports

# Remove the sign in front of what you want to say. A misspelt key is an error with its line.

# What it is for, in a sentence.
#description: int8 for my network

# The target, which a recipe under backend/ sets: $backends.
#backend: $backend

# How the pixels of an image become the input: (pixel * scale - mean) / std.
$preprocess

# How ranges are chosen where no rule says otherwise.
#observers: $observers

# Changes for some ops. A later rule wins; one that meets no op is an error unless it is optional. Ops are
# chosen by what they are (op, depthwise, gate, shared), by where they stand (position, before_output, feeds,
# follows, subgraph), which fits any code, or by name.
#rules:
#  - match: {position: last}
#    quantize_output: false
#  - match: {op: conv2d, depthwise: true}
#    weight: {bits: 8}
#    optional: true
#  - match: {name: "head.*"}
#    quantize: false
#    optional: true

# What changes the float network before it is quantized.
#ptq: $ptq

# How it is trained with rounding.
#qat: $qat

# What the result must reach.
#expect: $expect
""")

_DEFAULTS = {
    "preprocess": "{size: [3, 224, 224], mean: [0, 0, 0], std: [255, 255, 255]}",
    "observers": "{activation: mse, weight: minmax}",
    "ptq": "[fuse_bn]",
    "qat": "{fakequant: lsq, epochs: 10, lr: 0.001, bn: {fold: true}}",
    "expect": "{metric: top1, max_drop: 0.5}",
}


# Key of preprocess -> what it means, and its value where no import sets it.
_PIXELS = {
    "size": ("channels (1 for grey, or 3), height and width of the input", "[3, 224, 224]"),
    "channels": ("the model's order of channels, in which mean and std are, too: bgr or rgb", "bgr"),
    "scale": ("what pixels of 0 to 255 are multiplied by first; 0.00392156862745098 is 1/255", "1.0"),
    "mean": ("what is subtracted then, a number for each channel", "[0, 0, 0]"),
    "std": ("what each channel is divided by at last", "[255, 255, 255]"),
    "resize": ("stretch; center_crop keeps the aspect and cuts; letterbox keeps it and fills up", "stretch"),
    "crop_fraction": (
        "for center_crop: the share of the image's side that stays, 0.875 is 224 of 256",
        "0.875",
    ),
    "fill": ("for letterbox: the value of the pixels that are filled up, 0 to 255", "114"),
    "fill_at": ("for letterbox: on both sides, around the image, or at its end as YOLOX has it", "around"),
    "interpolation": ("how images are resized, as in OpenCV: nearest, linear, cubic or area", "linear"),
    "layout": ("the axes of uint8 arrays of pixels: nchw, or nhwc for channels last", "nchw"),
}
_OF_RESIZE = {"crop_fraction": "center_crop", "fill": "letterbox", "fill_at": "letterbox"}


def _describe_pixels(values: Mapping[str, Any]) -> str:
    """Returns ``preprocess`` with all keys, below their meanings; keys of another ``resize`` as comments."""
    resize = values.get("resize", "stretch")
    lines = ["preprocess:"]
    for key, (meaning, default) in _PIXELS.items():
        sign = "#" if _OF_RESIZE.get(key, resize) != resize else ""
        text = _flow(values[key]) if key in values else default
        lines += [f"  # {meaning[0].upper()}{meaning[1:]}.", f"  {sign}{key}: {text}"]
    return "\n".join(lines)


def starter(
    names: Sequence[str], out: Path | None, *, allow_code: bool = False, for_images: bool = False
) -> str:
    """Writes a recipe that imports ``names``, with their settings as comments to change.

    Args:
        names: names or files of recipes.
        out: the file of the new recipe, to which imported files are relative; None for stdout.
        allow_code: whether the recipes may name code, as for `qtrace.load_recipe`.
        for_images: whether every key of ``preprocess`` is written, with its meaning.

    Raises:
        ConfigError: when one of the recipes cannot be read.
    """
    from qtrace.config import backends
    from qtrace.config.recipe import SCHEMA, load_recipe

    configs = [load_recipe(name, allow_code=allow_code) for name in names]
    settings: dict[str, Any] = {}
    for config in configs:
        settings.update((key, value) for key, value in config.to_dict().items() if value)
    values = {key: _flow(settings[key]) if key in settings else default for key, default in _DEFAULTS.items()}
    pixels = settings.get("preprocess", {})
    values["preprocess"] = _describe_pixels(pixels) if for_images else f"#preprocess: {values['preprocess']}"
    return _TEXT.substitute(
        values,
        schema=SCHEMA,
        name="" if out is None else f"name: {_flow(out.stem)}\n",
        imports=_flow([_relative_to(name, out) for name in names]),
        backends=", ".join(backends.known()),
        backend=settings.get("backend", "onnxruntime"),
    )


def _relative_to(name: str, out: Path | None) -> str:
    """Returns the path of file ``name`` relative to the folder of ``out``; other names unchanged."""
    from qtrace.config.recipe import importable

    return name if out is None else importable(name, out.parent)


# The kind of the recipes in each folder.
_KINDS = {"": "family", "backend": "target", "common": "part"}
_TITLES = {
    "family": "Families and presets",
    "target": "Targets, to be imported before a family",
    "part": "Parts, which families import",
}


@click.group(
    cls=options.Group,
    example="""
    qtrace recipes list
    qtrace recipes show resnet50
    qtrace recipes new --from backend/tensorrt --from resnet --out mine.yaml
    qtrace recipes check mine.yaml --model resnet18.mge
    """,
)
def recipes() -> None:
    """List, show, check and begin recipes."""


@recipes.command("list", example="qtrace recipes list", no_args_is_help=False)
@options.output
def list_recipes(console: Console) -> None:
    """List the recipes that come with qtrace, one a line."""
    with console.work():
        import qtrace
        from qtrace.config import backends
        from qtrace.config.recipe import recipe_names

        # A target's own name, such as `onnxruntime`, stands for its recipe.
        kinds = {name: _KINDS.get(name.rpartition("/")[0], "family") for name in recipe_names()}
        kinds.update((name, "target") for name in backends.known() if name in kinds)
        rows = [
            {"name": name, "kind": kind, "description": qtrace.load_recipe(name).description or ""}
            for name, kind in kinds.items()
        ]
    width = max(len(row["name"]) for row in rows)
    blocks = []
    for kind, title in _TITLES.items():
        lines = [f"  {row['name']:{width}}  {row['description']}" for row in rows if row["kind"] == kind]
        blocks.append("\n".join([f"{title}:", *lines]))
    console.result("\n\n".join(blocks), rows)


@recipes.command(example="qtrace recipes show resnet50")
@click.argument("name")
@options.allow_code
@options.output
def show(name: str, allow_code: bool, console: Console) -> None:
    """Print a recipe with its imports merged: a recipe file again.

    Its comments give the reason of each value and rule, and the file and line that it comes from. NAME is a
    name or a YAML file.
    """
    with console.work():
        from qtrace.config.written import resolve_recipe

        resolved = resolve_recipe(name, allow_code=allow_code)
        text = resolved.text().rstrip("\n")
        entries = [entry.to_dict() for entry in resolved.entries]
    console.result(text, {"name": name, "file": resolved.file, "recipe": text, "entries": entries})


@recipes.command(
    example="""
    qtrace recipes check mine.yaml
    qtrace recipes check mine.yaml --model resnet18.mge
    qtrace recipes check mine.yaml --model models:resnet18 --shape 1x3x224x224
    """,
)
@click.argument("file")
@click.option(
    "--model",
    "-m",
    metavar="MODEL",
    help="Also show which rule matches which ops of this traced file or code.",
)
@options.example
@options.allow_code
@options.allow
@options.output
def check(
    file: str,
    model: models.NamedModel | None,
    shapes: models.Shapes,
    allow_code: bool,
    console: Console,
) -> int:
    """Report the mistakes of a recipe with file and line. The exit code is 1 if there is one.

    FILE is a YAML file or a name. MODEL is a traced file, or pkg.mod:factory with --shape.
    """
    if shapes and model is None:
        raise click.UsageError("--shape is for --model.")
    with console.work():
        qconfig, problems = _without_model(file, allow_code)
        matches: tuple[RuleMatch, ...] = ()
        if qconfig is not None and model is not None and not problems:
            matches, problems = _with_model(qconfig, model, shapes)
    data = {
        "file": file,
        "passed": not problems,
        "problems": [split_location(problem) or {"message": problem} for problem in problems],
        "rules": [match.to_dict() for match in matches],
    }
    lines = list(problems)
    if matches:
        lines.append(table(matches))
    if not problems and qconfig is not None:
        lines.append(f"{file}: {len(qconfig.rules)} rules for {qconfig.backend}, nothing wrong.")
    console.result("\n".join(lines), data)
    return 1 if problems else 0


def _without_model(file: str, allow_code: bool) -> tuple[Any, list[str]]:
    """Loads the config, None if that fails, and lists its mistakes."""
    import qtrace
    from qtrace.config.checking import mistakes
    from qtrace.errors import ConfigError

    try:
        qconfig = qtrace.load_recipe(file, allow_code=allow_code)
    except ConfigError as error:
        problems = str(error).split("\n")
        if not all(split_location(problem) for problem in problems):
            raise  # not a recipe, such as a missing file
        return None, problems
    return qconfig, list(mistakes(qconfig))


def _with_model(
    qconfig: Any, model: models.NamedModel, shapes: models.Shapes
) -> tuple[tuple[RuleMatch, ...], list[str]]:
    """Matches the rules with the ops of a model, and lists the rules that match none."""
    from qtrace.errors import ConfigError

    traced = model.load_or_trace(shapes)
    try:
        matches = match_rules(traced, qconfig)
    except ConfigError as error:
        return (), str(error).split("\n")
    return matches, [match.problem for match in matches if match.problem]


@recipes.command(example="qtrace recipes new --from backend/tensorrt --from resnet --out mine.yaml")
@click.option(
    "--from",
    "names",
    metavar="NAME",
    multiple=True,
    required=True,
    help="A recipe to import, by name or as a file. Repeatable; a later one wins.",
)
@click.option(
    "--out", "-o", type=options.file_or_folder(), help="The file to write; without it, print the text."
)
@click.option(
    "--for-images",
    is_flag=True,
    help="Write every key of preprocess, with its meaning: how pixels become inputs.",
)
@options.allow_code
@options.output
def new(
    names: tuple[str, ...], out: Path | None, for_images: bool, allow_code: bool, console: Console
) -> None:
    """Begin a recipe that imports others, with comments on what it may change."""
    with console.work():
        from qtrace.config.recipe import is_recipe_file
        from qtrace.errors import ConfigError

        if out is not None and not is_recipe_file(out.name):
            raise click.UsageError(f"{out}: the name of a recipe file ends with .yaml or .yml.")
        text = starter(names, out, allow_code=allow_code, for_images=for_images)
        if out is not None:
            if out.exists():
                raise ConfigError(f"{out} exists already; name another file or remove it.")
            if not out.parent.is_dir():
                raise ConfigError(f"{out} cannot be written: No such folder as {out.parent}.")
            with output_file(out) as partial:
                partial.write_text(text, encoding="utf-8")
    shown = text.rstrip("\n") if out is None else str(out)
    console.result(shown, {"file": None if out is None else str(out), "recipe": text})

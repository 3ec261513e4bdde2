"""``qtrace recipes``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from qtrace.cli import help, matching, models, options
from qtrace.cli.console import Console
from qtrace.cli.outputs import output_file

__all__ = ["recipes"]

# By the folder of a recipe: how the list calls what is in it.
_KINDS = {"": "family", "backend": "target", "common": "part"}
_TITLES = {
    "family": "Families and presets",
    "target": "Targets, to be imported before a family",
    "part": "Parts, which families import",
}


@click.group(
    cls=help.Group,
    example="""
    qtrace recipes list
    qtrace recipes show resnet50
    qtrace recipes new --from backend/tensorrt --from resnet --out mine.yaml
    qtrace recipes check mine.yaml --model resnet18.mge
    """,
)
def recipes() -> None:
    """List, show, check and begin recipes."""


@recipes.command(
    "list",
    cls=help.Command,
    example="qtrace recipes list",
    no_args_is_help=False,
)
@options.output
def list_recipes(console: Console) -> None:
    """List the recipes that come with qtrace, a line each."""
    with console.work():
        import qtrace
        from qtrace.config import backends
        from qtrace.config.recipe import recipe_names

        # A target's own name, as in `onnxruntime`, is short for that of its recipe.
        kinds = {name: _KINDS.get(name.rpartition("/")[0], "family") for name in recipe_names()}
        kinds.update((name, "target") for name in backends.known() if name in kinds)
        found = [
            {"name": name, "kind": kind, "description": qtrace.load_recipe(name).description or ""}
            for name, kind in kinds.items()
        ]
    width = max(len(one["name"]) for one in found)
    blocks = []
    for kind, title in _TITLES.items():
        rows = [f"  {one['name']:{width}}  {one['description']}" for one in found if one["kind"] == kind]
        blocks.append("\n".join([f"{title}:", *rows]))
    console.result("\n\n".join(blocks), found)


@recipes.command(
    cls=help.Command,
    example="qtrace recipes show resnet50",
)
@click.argument("name")
@options.allow_code
@options.output
def show(name: str, allow_code: bool, console: Console) -> None:
    """Print a recipe with its imports merged: a recipe file again.

    Its comments are the reasons, and the file and line that each value and rule comes from. NAME is a name or
    a YAML file.
    """
    with console.work():
        from qtrace.config.recipe import resolve_recipe

        resolved = resolve_recipe(name, allow_code=allow_code)
        text = resolved.text().rstrip("\n")
        entries = [entry.to_dict() for entry in resolved.entries]
    console.result(text, {"name": name, "file": resolved.file, "recipe": text, "entries": entries})


@recipes.command(
    cls=help.Command,
    example="""
    qtrace recipes check mine.yaml
    qtrace recipes check mine.yaml --model resnet18.mge
    qtrace recipes check mine.yaml --model models:resnet18 --shape 1x3x224x224
    """,
)
@click.argument("file")
@click.option(
    "--model", "-m", metavar="MODEL", help="Also tell which rule meets which ops of this traced file or code."
)
@options.example
@options.allow_code
@options.allow
@options.output
def check(
    file: str,
    model: str | None,
    shapes: models.Shapes,
    allow_code: bool,
    allow: tuple[str, ...],
    console: Console,
) -> int:
    """Tell what is wrong with a recipe, with file and line. The exit code is 1 if something is.

    FILE is a YAML file or a name. MODEL is a traced file, or pkg.mod:factory with --shape.
    """
    if shapes and model is None:
        raise click.UsageError("--shape is for --model.")
    with console.work():
        qconfig, problems = _without_model(file, allow_code)
        met: tuple[matching.Met, ...] = ()
        if qconfig is not None and model is not None and not problems:
            met, problems = _with_model(qconfig, model, shapes, allow)
    told = [matching.placed(problem) or {"message": problem} for problem in problems]
    data = {"file": file, "passed": not problems, "problems": told, "rules": [one.to_dict() for one in met]}
    lines = list(problems)
    if met:
        lines.append(matching.table(met))
    if not problems and qconfig is not None:
        lines.append(f"{file}: {len(qconfig.rules)} rules for {qconfig.backend}, nothing wrong.")
    console.result("\n".join(lines), data)
    return 1 if problems else 0


def _without_model(file: str, allow_code: bool) -> tuple[Any, list[str]]:
    """The config, None when the file cannot be read as one, and what is wrong."""
    import qtrace
    from qtrace.config.linting import mistakes
    from qtrace.errors import ConfigError

    try:
        qconfig = qtrace.load_recipe(file, allow_code=allow_code)
    except ConfigError as error:
        problems = str(error).split("\n")
        if not all(matching.placed(problem) for problem in problems):
            raise  # no recipe at all: a file that is missing
        return None, problems
    return qconfig, list(mistakes(qconfig))


def _with_model(
    qconfig: Any, model: str, shapes: models.Shapes, allow: tuple[str, ...]
) -> tuple[tuple[matching.Met, ...], list[str]]:
    """What the rules meet, and what is wrong about that."""
    from qtrace.errors import ConfigError

    factory = models.is_factory(model)
    traced = models.trace_factory(model, shapes=shapes) if factory else models.load_model(model, allow)
    try:
        met = matching.match(traced, qconfig)
    except ConfigError as error:
        return (), str(error).split("\n")
    return met, [one.problem for one in met if one.problem]


@recipes.command(
    cls=help.Command,
    example="qtrace recipes new --from backend/tensorrt --from resnet --out mine.yaml",
)
@click.option(
    "--from",
    "names",
    metavar="NAME",
    multiple=True,
    required=True,
    help="A recipe to import, by name or as a file. Repeatable; later ones win.",
)
@click.option(
    "--out", "-o", type=options.file_or_folder(), help="The file to write; without it, print the text."
)
@options.allow_code
@options.output
def new(names: tuple[str, ...], out: Path | None, allow_code: bool, console: Console) -> None:
    """Begin a recipe that imports others, with comments on what it may change."""
    with console.work():
        from qtrace.cli.starter import starter
        from qtrace.errors import ConfigError

        if out is not None and out.suffix not in (".yaml", ".yml"):
            raise click.UsageError(f"{out}: the name of a recipe file ends with .yaml or .yml.")
        text = starter(names, out, allow_code=allow_code)
        if out is not None:
            if out.exists():
                raise ConfigError(f"{out} exists already; name another file or remove it.")
            if not out.parent.is_dir():
                raise ConfigError(f"{out} cannot be written: No such folder as {out.parent}.")
            with output_file(out) as partial:
                partial.write_text(text, encoding="utf-8")
    shown = text.rstrip("\n") if out is None else str(out)
    console.result(shown, {"file": None if out is None else str(out), "recipe": text})

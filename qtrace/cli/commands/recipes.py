"""The command ``qtrace recipes``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from qtrace.cli import help, matching, models, options
from qtrace.cli.console import Console
from qtrace.storage.outputs import output_file

__all__ = ["recipes"]

# The kind of the recipes in each folder.
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


@recipes.command(
    cls=help.Command,
    example="qtrace recipes show resnet50",
)
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
    cls=help.Command,
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
    model: str | None,
    shapes: models.Shapes,
    allow_code: bool,
    allow: tuple[str, ...],
    console: Console,
) -> int:
    """Report the mistakes of a recipe with file and line. The exit code is 1 if there is one.

    FILE is a YAML file or a name. MODEL is a traced file, or pkg.mod:factory with --shape.
    """
    if shapes and model is None:
        raise click.UsageError("--shape is for --model.")
    with console.work():
        qconfig, problems = _without_model(file, allow_code)
        matches: tuple[matching.RuleMatch, ...] = ()
        if qconfig is not None and model is not None and not problems:
            matches, problems = _with_model(qconfig, model, shapes, allow)
    data = {
        "file": file,
        "passed": not problems,
        "problems": [matching.split_location(problem) or {"message": problem} for problem in problems],
        "rules": [match.to_dict() for match in matches],
    }
    lines = list(problems)
    if matches:
        lines.append(matching.table(matches))
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
        if not all(matching.split_location(problem) for problem in problems):
            raise  # not a recipe, such as a missing file
        return None, problems
    return qconfig, list(mistakes(qconfig))


def _with_model(
    qconfig: Any, model: str, shapes: models.Shapes, allow: tuple[str, ...]
) -> tuple[tuple[matching.RuleMatch, ...], list[str]]:
    """Matches the rules with the ops of a model, and lists the rules that match none."""
    from qtrace.errors import ConfigError

    factory = models.is_factory(model)
    traced = models.trace_factory(model, shapes=shapes) if factory else models.load_model(model, allow)
    try:
        matches = matching.match_rules(traced, qconfig)
    except ConfigError as error:
        return (), str(error).split("\n")
    return matches, [match.problem for match in matches if match.problem]


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
        from qtrace.cli.starter import starter
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

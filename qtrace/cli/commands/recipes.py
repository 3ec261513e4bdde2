"""``qtrace recipes``."""

from __future__ import annotations

import click

from qtrace.cli import help, options
from qtrace.cli.console import Console

__all__ = ["recipes"]


@click.group(
    cls=help.Group,
    example="""
    qtrace recipes list
    qtrace recipes show resnet50 > mine.yaml
    """,
)
def recipes() -> None:
    """List and show the recipes that come with qtrace."""


@recipes.command(
    "list",
    cls=help.Command,
    example="qtrace recipes list",
    no_args_is_help=False,
)
@options.output
def list_recipes(console: Console) -> None:
    """List the names of all recipes."""
    with console.work():
        from qtrace.recipe import recipe_names

        names = list(recipe_names())
    console.result("\n".join(names), names)


@recipes.command(
    cls=help.Command,
    example="qtrace recipes show resnet50 > mine.yaml",
)
@click.argument("name")
@options.output
def show(name: str, console: Console) -> None:
    """Print a recipe in full, defaults included. NAME is a name or a YAML file."""
    with console.work():
        import qtrace
        from qtrace.recipe import dump_recipe

        text = str(dump_recipe(qtrace.load_recipe(name))).rstrip("\n")
    console.result(text, {"name": name, "recipe": text})

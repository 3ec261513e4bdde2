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
    """List all recipes, a line each."""
    with console.work():
        import qtrace
        from qtrace.recipe import recipe_names

        found = [{"name": n, "description": qtrace.load_recipe(n).description or ""} for n in recipe_names()]
    width = max(len(r["name"]) for r in found)
    console.result("\n".join(f"{r['name']:{width}}  {r['description']}" for r in found), found)


@recipes.command(
    cls=help.Command,
    example="qtrace recipes show resnet50 > mine.yaml",
)
@click.argument("name")
@options.output
def show(name: str, console: Console) -> None:
    """Print a recipe with its imports merged. NAME is a name or a YAML file."""
    with console.work():
        import qtrace
        from qtrace.recipe import dump_recipe

        text = str(dump_recipe(qtrace.load_recipe(name))).rstrip("\n")
    console.result(text, {"name": name, "recipe": text})

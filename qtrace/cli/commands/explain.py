"""``qtrace explain``."""

from __future__ import annotations

import click

from qtrace.cli import help, models, options
from qtrace.cli.console import Console

__all__ = ["explain"]


@click.command(
    cls=help.Command,
    example="qtrace explain resnet18.mge --recipe resnet50",
)
@click.argument("model")
@options.recipe
@options.example
@options.allow
@options.output
def explain(
    model: str, recipe: str | None, shapes: models.Shapes, allow: tuple[str, ...], console: Console
) -> None:
    """Tell for every op what is quantized, by which rule, or why it stays float.

    MODEL is a traced file (what the recipe would do), a prepared or quantized one (what was done), or
    pkg.mod:factory with --shape.
    """
    with console.work():
        import qtrace
        from qtrace.passes.record import is_quantized

        qconfig = qtrace.load_recipe(recipe) if recipe else None
        if models.is_factory(model):
            loaded = models.trace_factory(model, shapes=shapes)
        else:
            loaded = models.load_model(model, allow)
        if recipe and is_quantized(loaded):
            console.note(f"{model} is quantized already: this is what was done, --recipe has no say.")
        explanation = qtrace.explain(loaded, qconfig)
        text, data = explanation.table(), explanation.to_dict()
    console.result(text, data)

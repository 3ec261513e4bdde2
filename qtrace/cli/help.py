"""Commands whose ``--help`` ends with an example, and that refuse an empty argument."""

from __future__ import annotations

import itertools
from typing import Any

import click

__all__ = ["Command", "Group"]


class _Example(click.Command):
    def __init__(self, *args: Any, example: str, **kwargs: Any) -> None:
        kwargs.setdefault("no_args_is_help", True)
        super().__init__(*args, **kwargs)
        self.example = example

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Refuses an empty argument, such as a shell's variable that is not set; else parses them."""
        for before, text in itertools.pairwise(["", *args]):
            if not text or (text.startswith("--") and text.endswith("=")):
                flag = text[:-1] or before
                name = flag if flag.startswith("-") else "an argument"
                raise click.UsageError(f"{name} is empty: give a value, or leave it out.", ctx)
        return super().parse_args(ctx, args)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the example without wrapping, unlike an epilog."""
        with formatter.section("Example"):
            for line in self.example.strip().splitlines():
                formatter.write(f"  {line.strip()}\n")


class Command(_Example):
    """A command with an example."""


class Group(_Example, click.Group):
    """A group of commands with an example."""

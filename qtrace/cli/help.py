"""Commands whose ``--help`` ends with an example."""

from __future__ import annotations

from typing import Any

import click

__all__ = ["Command", "Group"]


class _Example(click.Command):
    def __init__(self, *args: Any, example: str, **kwargs: Any) -> None:
        kwargs.setdefault("no_args_is_help", True)
        super().__init__(*args, **kwargs)
        self.example = example

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the example without wrapping, unlike an epilog."""
        with formatter.section("Example"):
            for line in self.example.strip().splitlines():
                formatter.write(f"  {line.strip()}\n")


class Command(_Example):
    """A command with an example."""


class Group(_Example, click.Group):
    """A group of commands with an example."""

"""Looks things up in an annotation: who reads a node, what is quantized there, what shares parameters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from qtrace.preparation.annotation import Annotation, ExprNote, Fold, Plan, Site

__all__ = ["Index", "few"]


@dataclass(frozen=True)
class Index:
    """An annotation by name; every table is made once, in time linear in the graph.

    Attributes:
        annotation: the decisions for one graph.
    """

    annotation: Annotation

    @cached_property
    def notes(self) -> dict[str, ExprNote]:
        """The name of any output -> the note of the op that gives it."""
        return {name: note for note in self.annotation.notes for name in (note.name, *note.gives)}

    @cached_property
    def sites(self) -> dict[str, Site]:
        """The name of a site -> the site."""
        return {site.name: site for site in self.annotation.sites}

    @cached_property
    def at(self) -> dict[str, list[Site]]:
        """The name of a node -> the sites on its value."""
        found: dict[str, list[Site]] = {}
        for site in self.annotation.sites:
            found.setdefault(site.node, []).append(site)
        return found

    @cached_property
    def members(self) -> dict[str, list[Site]]:
        """A group -> the sites that share its parameters."""
        found: dict[str, list[Site]] = {}
        for site in self.annotation.sites:
            found.setdefault(site.group, []).append(site)
        return found

    @cached_property
    def readers(self) -> dict[str, list[ExprNote]]:
        """The name of a node -> the ops that read it."""
        found: dict[str, list[ExprNote]] = {}
        for note in self.annotation.notes:
            for name in dict.fromkeys(note.reads):
                found.setdefault(name, []).append(note)
        return found

    @cached_property
    def followers(self) -> dict[str, list[ExprNote]]:
        """The name of an op -> the ops that are fused into it."""
        found: dict[str, list[ExprNote]] = {}
        for note in self.annotation.notes:
            if note.into:
                found.setdefault(note.into, []).append(note)
        return found

    def is_last(self, note: ExprNote) -> bool:
        """Whether the result of ``note`` leaves its kernel."""
        kernel = self.followers.get(note.into or note.name)
        return not kernel or kernel[-1] is note

    @cached_property
    def biases(self) -> dict[str, Site]:
        """The name of a layer's output -> the site of its bias."""
        return {name: s for s in self.annotation.sites if s.sort == "bias" for name in s.consumers or ()}

    @cached_property
    def folds(self) -> dict[str, Fold]:
        """The name of a layer's output -> the BatchNorm that is folded into it."""
        return {fold.layer: fold for fold in self.annotation.folds}

    @cached_property
    def islands(self) -> dict[int, list[ExprNote]]:
        """The number of a float island -> its ops."""
        found: dict[int, list[ExprNote]] = {}
        for note in self.annotation.notes:
            if note.island:
                found.setdefault(note.island, []).append(note)
        return found

    def group(self, node: str) -> str:
        """The group of the integers that a node holds for all its readers; "" for a float one."""
        whole = (s.group for s in self.at.get(node, ()) if s.sort == "activation" and s.consumers is None)
        return self.annotation.carried.get(node) or next(whole, "")

    def plan(self, group: str) -> Plan | None:
        """How the sites of a group are quantized; None for those of biases and for ""."""
        site = self.sites.get(group)
        return None if site is None else site.plan

    def scheme(self, group: str) -> str:
        """The scheme of a group in words, or ""."""
        plan = self.plan(group)
        return "" if plan is None else plan.scheme.describe()


def few(names: Iterable[str], most: int = 3) -> str:
    """The first names, and how many more there are."""
    every = list(names)
    shown = every if len(every) <= most + 1 else every[:most]  # "and 1 more" is no shorter than its name
    rest = len(every) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")

"""Looks things up in an annotation: who reads a node, what is quantized there, what shares parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from qtrace.preparation.annotation import Annotation, ExprNote, Fold, Plan, Site

__all__ = ["Index"]


@dataclass(frozen=True)
class Index:
    """An annotation by name; every table is made once, in time linear in the graph.

    Attributes:
        annotation: the decisions for one graph.
        of_file: name of a node -> its names in the ONNX file that the graph was imported from.
    """

    annotation: Annotation
    of_file: Mapping[str, Sequence[str]] = field(default_factory=dict)

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
        sites: dict[str, list[Site]] = {}
        for site in self.annotation.sites:
            sites.setdefault(site.node, []).append(site)
        return sites

    @cached_property
    def members(self) -> dict[str, list[Site]]:
        """A group -> the sites that share its parameters."""
        sites: dict[str, list[Site]] = {}
        for site in self.annotation.sites:
            sites.setdefault(site.group, []).append(site)
        return sites

    @cached_property
    def readers(self) -> dict[str, list[ExprNote]]:
        """The name of a node -> the ops that read it."""
        notes: dict[str, list[ExprNote]] = {}
        for note in self.annotation.notes:
            for name in dict.fromkeys(note.reads):
                notes.setdefault(name, []).append(note)
        return notes

    @cached_property
    def followers(self) -> dict[str, list[ExprNote]]:
        """The name of an op -> the ops that are fused into it."""
        notes: dict[str, list[ExprNote]] = {}
        for note in self.annotation.notes:
            if note.into:
                notes.setdefault(note.into, []).append(note)
        return notes

    def names(self, note: ExprNote) -> list[str]:
        """Returns the names of an op: of its results, also in the file, and of the modules around it."""
        parts = note.path.split(".") if note.path else []
        modules = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
        of_file = (name for node in (note.name, *note.gives) for name in self.of_file.get(node, ()))
        return list(dict.fromkeys((*note.gives, *of_file, *modules)))

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
        notes: dict[int, list[ExprNote]] = {}
        for note in self.annotation.notes:
            if note.island:
                notes.setdefault(note.island, []).append(note)
        return notes

    def group(self, node: str) -> str:
        """Returns the group of the integers that a node holds for all its readers; "" for a float node."""
        groups = (s.group for s in self.at.get(node, ()) if s.sort == "activation" and s.consumers is None)
        return self.annotation.carried.get(node) or next(groups, "")

    def plan(self, group: str) -> Plan | None:
        """Returns the plan of a group; None for groups of biases and for ""."""
        site = self.sites.get(group)
        return None if site is None else site.plan

    def scheme(self, group: str) -> str:
        """Returns the scheme of a group in words, or ""."""
        plan = self.plan(group)
        return "" if plan is None else plan.scheme.describe()

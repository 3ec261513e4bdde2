"""The graph for Graphviz: ops coloured by what became of them, and a mark at every site."""

from __future__ import annotations

from collections.abc import Iterator

from qtrace.graph.views import quote
from qtrace.inspection.explanation._table import Index
from qtrace.preparation.annotation import ExprNote, Site
from qtrace.storage.outputs import WRITTEN

_FILLS = {
    "int": "#a6d96a",
    "fused": "#d9ef8b",
    "carried": "#c6dbef",
    "float": "#fdae61",
    "shape": "#eeeeee",
}
_MEANINGS = {
    "int": "computed on integers",
    "fused": "fused into the kernel",
    "carried": "moves integers",
    "float": "stays float",
    "shape": "shapes and constants",
}
_FLOAT_EDGE = 'style="dashed", color="#b35806"'
_INT_EDGE = 'color="#1a6e1a"'


def to_dot(index: Index, every: bool) -> str:
    """A digraph: boxes are ops, diamonds sites, a frame is one kernel; dashed edges carry floats.

    Args:
        index: the decisions.
        every: draw ops on shapes and constants, too.
    """
    return "\n".join(_Drawing(index, every).lines()) + "\n"


class _Drawing:
    def __init__(self, index: Index, every: bool) -> None:
        self.index = index
        self.notes = [n for n in index.annotation.notes if every or n.state != "shape"]
        # Names stand in labels only: an id of Graphviz's own needs no escaping.
        self.ids = {note.name: f"op{i}" for i, note in enumerate(self.notes)}
        self.source = {name: self.ids[note.name] for note in self.notes for name in note.gives}
        self.marks = {
            s.name: f"site{i}" for i, s in enumerate(index.annotation.sites) if s.sort == "activation"
        }

    def lines(self) -> Iterator[str]:
        yield "digraph qtrace {"
        yield f'  graph [rankdir="TB", fontname="Helvetica", comment="{WRITTEN}"];'
        yield '  node [shape="box", style="filled", fontname="Helvetica", fontsize="10"];'
        yield '  edge [fontname="Helvetica", fontsize="9"];'
        yield from self._legend()
        for number, name in enumerate(self.index.annotation.inputs):
            self.source[name] = f"in{number}"
            yield f'  in{number} [label={_quoted(name)}, shape="ellipse", fillcolor="#ffffff"];'
        yield from self._parameters()
        for note in self.notes:
            if note.state != "fused":  # these stand in the frame of their kernel
                yield from self._kernel(note)
        for site in self.index.annotation.sites:
            if site.name in self.marks:
                yield from self._site(site)
        for note in self.notes:
            yield from self._edges(note)
        yield from self._results()
        yield "}"

    def _parameters(self) -> Iterator[str]:
        """Draws rounded values that are no drawn ops: parameters and what is computed only from them."""
        names = (s.node for s in self.index.annotation.sites if s.name in self.marks)
        for number, name in enumerate(dict.fromkeys(n for n in names if n not in self.source)):
            self.source[name] = f"fixed{number}"
            yield f'  fixed{number} [label={_quoted(name)}, shape="ellipse", fillcolor="#eeeeee"];'

    def _legend(self) -> Iterator[str]:
        yield "  subgraph cluster_legend {"
        yield f'    label={_quoted(f"backend {self.index.annotation.backend}")}; style="rounded";'
        present = {n.state for n in self.notes}
        for state, meaning in _MEANINGS.items():
            if state in present:
                yield f'    legend_{state} [label={_quoted(meaning)}, fillcolor="{_FILLS[state]}"];'
        yield '    legend_site [label="site: rounded here", shape="diamond", fillcolor="#ffffbf"];'
        yield "  }"

    def _kernel(self, note: ExprNote) -> Iterator[str]:
        """An op, in a frame with those that are fused into it."""
        members = self.index.followers.get(note.name, [])
        if not members:
            yield f"  {self._box(note)}"
            return
        yield f"  subgraph cluster_{self.ids[note.name]} {{"
        yield '    label="one kernel"; style="rounded"; fontsize="9";'
        for member in (note, *members):
            yield f"    {self._box(member)}"
        yield "  }"

    def _box(self, note: ExprNote) -> str:
        label = [note.kind or note.op, note.name]
        if note.weight:
            label.append(f"weight {self.index.scheme(note.weight)}")
        if note.island:
            label.append(f"float island {note.island}")
        tip = f"{note.path or 'forward'}: {note.reason or _MEANINGS[note.state]}"
        return (
            f"{self.ids[note.name]} [label={_quoted(*label)}, tooltip={_quoted(tip)}, "
            f'fillcolor="{_FILLS[note.state]}"];'
        )

    def _site(self, site: Site) -> Iterator[str]:
        """A diamond, and the edge from what it rounds."""
        label = [self.index.scheme(site.group)]
        if len(self.index.members[site.group]) > 1:
            label.append(f"group {site.group}")
        yield (
            f"  {self.marks[site.name]} [label={_quoted(*label)}, tooltip={_quoted(f'site {site.name}')}, "
            'shape="diamond", fillcolor="#ffffbf", fontsize="8"];'
        )
        yield f"  {self._before(site)} -> {self.marks[site.name]} [{self._style(site)}];"

    def _before(self, site: Site) -> str:
        """Returns the source of a site: another site's integers of the node if any, else its value."""
        whole = self._whole(site.node)
        return self.marks[whole.name] if whole and whole is not site else self.source[site.node]

    def _whole(self, node: str) -> Site | None:
        """The site that rounds a node for all its readers."""
        sites = self.index.at.get(node, ())
        return next((s for s in sites if s.name in self.marks and s.consumers is None), None)

    def _style(self, site: Site) -> str:
        return _INT_EDGE if site.consumers is not None and self.index.group(site.node) else _FLOAT_EDGE

    def _edges(self, note: ExprNote) -> Iterator[str]:
        for name in dict.fromkeys(note.reads):
            own = [s for s in self.index.at.get(name, ()) if s.name in self.marks and s.consumers]
            site = next((s for s in own if note.name in (s.consumers or ())), None)
            yield from self._edge(name, site or self._whole(name), self.ids[note.name])

    def _results(self) -> Iterator[str]:
        for number, name in enumerate(self.index.annotation.outputs):
            yield f'  out{number} [label={_quoted(f"output {name}")}, shape="ellipse", fillcolor="#ffffff"];'
            yield from self._edge(name, self._whole(name), f"out{number}")

    def _edge(self, name: str, site: Site | None, end: str) -> Iterator[str]:
        if site is not None:
            yield f"  {self.marks[site.name]} -> {end} [{_INT_EDGE}];"
        elif name in self.source:
            inside = self.index.notes.get(name)
            carried = name in self.index.annotation.carried
            label = f", label={_quoted(self.index.annotation.carried[name])}" if carried else ""
            fused = inside is not None and bool(inside.into or self.index.followers.get(name))
            style = 'color="#888888"' if fused else _INT_EDGE if carried else _FLOAT_EDGE
            yield f"  {self.source[name]} -> {end} [{style}{label}];"


def _quoted(*lines: str) -> str:
    """Returns lines as one string of a DOT file."""
    return quote("\n".join(line.replace("\n", " ") for line in lines))

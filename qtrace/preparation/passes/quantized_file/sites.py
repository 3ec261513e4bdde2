"""Places one site for each given rounding, and decides from them which ops compute on integers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from qtrace.config import QConfig
from qtrace.graph.types import Expr, GetAttr, Input, Node, TensorNode, TracedModule
from qtrace.ops import Role
from qtrace.preparation.annotation import Annotation, Plan, Site, free_name
from qtrace.preparation.passes._chains import Chain, Chains, find_chains
from qtrace.preparation.passes._choices import GIVEN, Choice
from qtrace.preparation.passes._notes import write_notes
from qtrace.preparation.passes._sites import Placement
from qtrace.preparation.passes._view import INT_ROLES, plan_of, read_view
from qtrace.preparation.passes.quantized_file.marks import Mark
from qtrace.preparation.passes.quantized_file.schemes import Schemes
from qtrace.preparation.passes.quantized_file.tensors import StoredGrid
from qtrace.scheme import QParams

__all__ = ["FileRoundings", "decide"]

_FLOAT = "the file, which does not round its inputs,"


@dataclass
class FileRoundings:
    """The given roundings of a graph, and what is decided about them.

    Attributes:
        model: the flat, expanded graph.
        marks: node -> the roundings of its value.
        parameters: path of a parameter -> its grid.
        config: the config: backend, observers, fake quant.
        qparams: site -> its parameters.
        stored: site of a parameter -> its grid.
        problems: a clause for each rounding without an equal.
    """

    model: TracedModule
    marks: Mapping[Node, list[Mark]]
    parameters: Mapping[str, StoredGrid]
    config: QConfig
    qparams: dict[str, QParams] = field(default_factory=dict)
    stored: dict[str, StoredGrid] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)

    def label(self, site: str) -> str:
        """Returns the name of a site's tensor in the file."""
        return self.labels.get(site, site)


def decide(given: FileRoundings) -> Annotation:
    """Returns the annotation with a site for each rounding of ``given``, and adds to its problems."""
    return _Decider(given).run()


class _Decider:
    """Walks the graph forwards; each rounding becomes a site or is carried by an op that moves integers."""

    def __init__(self, given: FileRoundings) -> None:
        self.given, self.model = given, given.model
        self.moves = read_view(self.model, given.config)
        self.backend, self.calls, self.choices = self.moves.backend, self.moves.calls, self.moves.choices
        self.schemes = Schemes([m.grid for marks in given.marks.values() for m in marks], given.parameters)
        self.placement = Placement()
        self.grids: dict[str, StoredGrid] = {}  # activation site -> its grid
        self.weights: dict[Expr, Site] = {}
        self.rescaled: set[Expr] = set()  # multiplications that round their result
        self.names: set[str] = set()

    def run(self) -> Annotation:
        self._place_weights()
        for node in self.model.graph.inputs:
            self._place(node)
        for expr in self.moves.order:
            if self.moves.carries(expr):
                self._carry(expr)
            for node in expr.outputs:
                if isinstance(expr, GetAttr) and expr.name in self.given.parameters:
                    self._place_constant(expr)
                else:
                    self._place(node)
        biases = list(self._biases())
        view = replace(self.moves, choices=self._decided_choices())
        chains = self._cut(find_chains(view))
        weights = {site.name: site for site in self.weights.values()}
        return Annotation(
            backend=self.backend.name,
            notes=write_notes(view, chains, {}, self.placement, self.weights),
            sites=(*self.placement.sites.values(), *weights.values(), *biases),
            carried=self.placement.carried(),
            inputs=tuple(n.name for n in self.model.graph.inputs if isinstance(n, TensorNode)),
            outputs=tuple(n.name for n in self.model.graph.outputs if isinstance(n, TensorNode)),
            factors={node.name: factor for node, factor in self.placement.factors.items()},
        )

    # -- activations ----------------------------------------------------------------------------------

    def _carry(self, expr: Expr) -> None:
        """Gives the outputs of a move the group of its input, unless the file rounds them otherwise."""
        placement, source = self.placement, self.calls[expr].inputs[0]
        group = placement.group_read(expr, source)
        if not group:
            return
        factor = placement.factor_read(expr, source) * self.moves.scaling.get(expr, 1.0)
        for node in expr.outputs:
            roots = [m for m in self.given.marks.get(node, ()) if m.parent is None]
            if expr in self.moves.scaling and not all(
                m.grid.equals(self.grids[group], factor) for m in roots
            ):
                self.rescaled.add(expr)
                return
            placement.groups[node] = group
            if factor != 1.0:
                placement.factors[node] = factor

    def _place(self, node: Node) -> None:
        """Places the roundings of a computed value or an input."""
        marks = list(self.given.marks.get(node, ()))
        present = self.placement.groups.get(node, "")
        if present:
            factor = self.placement.factors.get(node, 1.0)
            same = [m for m in marks if m.parent is None and m.grid.equals(self.grids[present], factor)]
            marks = [m for m in marks if m not in same]
            for mark in marks:
                mark.parent = None if mark.parent in same else mark.parent
        roots = [mark for mark in marks if mark.parent is None]
        nested = [mark for mark in marks if mark.parent is not None]
        whole = len(roots) == 1 and self._read_by_all(node, marks) and not present
        if nested and (not whole or any(m.parent is not roots[0] for m in nested)):
            self._problem(nested[0].grid, "rounds a rounded value that other ops read, too")
            return
        for mark in roots:
            is_value = whole and (bool(nested) or not isinstance(node.expr, Input) or mark.leaves)
            self._add_activation(node, mark, everyone=is_value, whole=whole)
        for mark in nested:
            self._add_activation(node, mark, everyone=False, whole=False)

    def _read_by_all(self, node: Node, marks: list[Mark]) -> bool:
        readers = [reader for mark in marks for reader in mark.readers]
        if node in self.moves.outputs and not any(mark.leaves for mark in marks):
            return False
        plain = replace(self.moves)
        plain.__dict__["outputs"] = set()
        return plain.all_values_read_by(node, readers)

    def _add_activation(self, node: Node, mark: Mark, everyone: bool, whole: bool) -> None:
        if mark.leaves and not everyone:
            self._problem(mark.grid, "rounds an output of the graph that is also read in another form")
            return
        if not mark.readers and not everyone:
            return
        scheme = self.schemes.activation(mark.grid)
        if scheme is None:
            self._problem(mark.grid, f"rounds an activation to {mark.grid.kind} or with a scale per channel")
            return
        names = None if everyone else tuple(reader.outputs[0].name for reader in mark.readers)
        preferred = node.name if everyone or whole or names is None else f"{node.name}__{names[0]}"
        choice = self.choices.get(mark.readers[0]) if mark.readers else None
        plan = self._plan(scheme, choice)
        name = self._register(preferred, QParams(scheme, mark.grid.scale, mark.grid.zero_point), mark.grid)
        site = Site(name, "activation", node.name, names, name, plan)
        self.placement.sites[name] = site
        self.grids[name] = mark.grid
        if everyone:
            self.placement.groups[node] = name
        for reader in () if everyone else mark.readers:
            self.placement.reads[reader, node] = name

    def _place_constant(self, expr: GetAttr) -> None:
        """Places the site of a stored tensor that ops read as a value, not as weight or bias."""
        node, grid = expr.outputs[0], self.given.parameters[expr.name]
        users = [u for u in dict.fromkeys(node.users) if u in self.calls]
        readers = [u for u in users if node not in (self.calls[u].weight, self.calls[u].bias)]
        if not readers:
            return
        scheme = self.schemes.weight(grid)
        if scheme is None or grid.scale.size > 1:
            self._problem(grid, f"is a constant stored as {grid.kind} or with a scale per channel")
            return
        names = tuple(reader.outputs[0].name for reader in readers)
        qparams = QParams(scheme, grid.scale.reshape(()), grid.zero_point.reshape(()))
        name = self._register(node.name, qparams, grid)
        plan = self._plan(scheme, self.choices.get(readers[0]))
        self.placement.sites[name] = Site(name, "activation", node.name, names, name, plan, static=True)
        self.grids[name] = self.given.stored[name] = grid
        self.placement.reads.update({(reader, node): name for reader in readers})

    # -- parameters -----------------------------------------------------------------------------------

    def _place_weights(self) -> None:
        used: set[str] = set()
        for node, grid in self._stored_nodes():
            used.add(grid.label)
            layers = [
                u for u in dict.fromkeys(node.users) if u in self.calls and self.calls[u].weight is node
            ]
            if not layers:
                continue
            call = self.calls[layers[0]]
            channels = (
                int(np.prod([int(node.shape[a]) for a in call.channel_axes])) if call.channel_axes else 1
            )
            scheme = self.schemes.weight(grid)
            per_channel = grid.scale.size > 1 or (
                grid.scale.ndim == 1 and channels == 1 and call.channel_axes
            )
            if scheme is None or (grid.scale.size > 1 and grid.scale.size != channels):
                self._problem(grid, f"is a weight stored as {grid.kind} with {grid.scale.size} scales")
                continue
            shape: tuple[int, ...] = (-1,) if per_channel else ()
            scheme = scheme.replace(axis=0) if per_channel else scheme
            qparams = QParams(scheme, grid.scale.reshape(shape), grid.zero_point.reshape(shape))
            name = self._register(node.name, qparams, grid)
            names = tuple(layer.outputs[0].name for layer in layers)
            axes = tuple(call.channel_axes) if per_channel else ()
            plan = self._plan(scheme, self.choices[layers[0]], weight=True)
            site = Site(name, "weight", node.name, names, name, plan, axes, static=True)
            self.given.stored[name] = grid
            self.weights.update(dict.fromkeys(layers, site))
        for grid in self.given.parameters.values():
            if grid.label not in used:
                self._problem(grid, "is a parameter of a layer that qtrace does not quantize")

    def _stored_nodes(self) -> Iterator[tuple[TensorNode, StoredGrid]]:
        for expr in self.moves.order:
            if isinstance(expr, GetAttr) and expr.name in self.given.parameters:
                yield expr.outputs[0], self.given.parameters[expr.name]

    def _biases(self) -> Iterator[Site]:
        for node, grid in self._stored_nodes():
            layers = [u for u in dict.fromkeys(node.users) if u in self.calls and self.calls[u].bias is node]
            for layer in layers:
                call = self.calls[layer]
                group = self.placement.group_read(layer, call.inputs[0])
                if not group or layer not in self.weights or grid.kind != "int32":
                    self._problem(grid, "is the bias of a layer whose input or weight is not rounded")
                    continue
                name = free_name(node.name, self.names, self.moves.node_names)
                self.names.add(name)
                self.given.stored[name] = grid
                factor = self.placement.factor_read(layer, call.inputs[0])
                yield Site(
                    name, "bias", node.name, (call.out.name,), name, None, (), True, group,
                    self.weights[layer].name, factor,
                )  # fmt: skip

    # -- ops --------------------------------------------------------------------------------------------

    def _decided_choices(self) -> dict[Expr, Choice]:
        """Returns the choice of each op: on integers if the file rounds what it reads."""
        choices = dict(self.choices)
        on_integers: set[Expr] = set()
        for expr, call in self.calls.items():
            if call.role not in (*INT_ROLES, Role.FLOAT) or (
                self.moves.carries(expr) and expr not in self.rescaled
            ):
                continue
            rounded = any(self.placement.group_read(expr, node) for node in call.inputs)
            if rounded or expr in self.weights or self._is_fused(expr, on_integers):
                on_integers.add(expr)
                choices[expr] = replace(choices[expr], quantize=True, decided=GIVEN)
            else:
                choices[expr] = replace(choices[expr], quantize=False, decided=_FLOAT)
            if expr in self.rescaled:
                choices[expr] = replace(choices[expr], output=choices[expr].activation)
        return choices

    def _is_fused(self, expr: Expr, on_integers: set[Expr]) -> bool:
        """Returns whether the kernel of the op before computes ``expr``, too."""
        if len(self.calls[expr].inputs) != 1:
            return False
        before = self.calls[expr].inputs[0].expr
        fits = before in on_integers and self.moves.only_user(before) is expr
        return fits and self.calls[expr].kind in self.backend.fused.get(self.calls[before].kind, ())

    def _cut(self, chains: Chains) -> dict[Expr, Chain]:
        """Cuts chains after an op whose result is rounded."""
        cut: dict[Expr, Chain] = {}
        for chain in dict.fromkeys(chains.values()):
            part: list[Expr] = []
            for expr in chain.exprs:
                part.append(expr)
                if expr is chain.tail or expr.outputs[0] in self.placement.groups:
                    cut.update(dict.fromkeys(part, Chain(tuple(part))))
                    part = []
        return {expr: cut[expr] for expr in chains}

    # -- common -----------------------------------------------------------------------------------------

    def _plan(self, scheme: object, choice: Choice | None, weight: bool = False) -> Plan:
        config = self.given.config
        observer = config.weight_observer if weight else config.activation_observer
        if choice is not None:
            observer = choice.weight_observer if weight else choice.activation_observer
        return plan_of(scheme, observer, config.effective_fakequant)  # type: ignore[arg-type]

    def _register(self, preferred: str, qparams: QParams, grid: StoredGrid) -> str:
        name = free_name(preferred, self.names, self.moves.node_names)
        self.names.add(name)
        self.given.qparams[name] = qparams
        self.given.labels[name] = grid.label
        return name

    def _problem(self, grid: StoredGrid, reason: str) -> None:
        self.given.problems.append(f"{grid.label} {reason}")

"""Sites that are given, as in a quantized file: a prepared, calibrated module without any data.

`take_marks` takes the roundings out of a graph, and `decide` places one site for each of them.
`quantize_as_file` makes the prepared module and checks that no integer has changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from megengine import Tensor
from megengine.module import Module

from qtrace.config import QConfig
from qtrace.errors import SHOWN_LINES, GraphError, shorten_list
from qtrace.graph.edit import GraphEditor
from qtrace.graph.flatten import delete_attribute, flatten
from qtrace.graph.interpreter import evaluate_fixed
from qtrace.graph.lint import check
from qtrace.graph.types import Expr, GetAttr, Input, Node, TensorNode, TracedModule
from qtrace.graph.walk import exprs, owner
from qtrace.numerics import expand_blocks
from qtrace.ops import Role
from qtrace.preparation.annotation import Annotation, Plan, Site, free_name
from qtrace.preparation.model import QuantizedModel, QuantizedSite, Record, write_record
from qtrace.preparation.passes._choices import GIVEN, Choice, RoundingChoice
from qtrace.preparation.passes._sites import Chain, Chains, Placement, find_chains
from qtrace.preparation.passes._view import INT_ROLES, read_view
from qtrace.preparation.passes.annotate import write_notes
from qtrace.preparation.passes.expand import expand
from qtrace.preparation.passes.insert import insert
from qtrace.preparation.phases import switch_phase
from qtrace.scheme import QParams, QScheme

# A rounding that is given: the grid of a tensor, and the module that marks it in a traced graph.


@dataclass(frozen=True, eq=False)
class StoredGrid:
    """The integers that a tensor is rounded to, and the numbers that they stand for.

    Attributes:
        label: the name of the tensor in its file, for messages.
        kind: numpy name of the integer type, such as ``uint8``.
        scale: float32 of shape ``()`` or ``(channels,)``.
        zero_point: integers of the shape of ``scale``.
        integers: the stored integers of a parameter; None for an activation.
    """

    label: str
    kind: str
    scale: np.ndarray
    zero_point: np.ndarray
    integers: np.ndarray | None = None

    def equals(self, other: StoredGrid, factor: float = 1.0) -> bool:
        """Returns whether both have the same type, zero point and, times ``factor``, the same scale.

        Args:
            other: another grid.
            factor: the factor of the scale of ``other``.
        """
        return (
            self.kind == other.kind
            and np.array_equal(self.zero_point, other.zero_point)
            and np.array_equal(self.scale, other.scale * np.float32(factor))
        )


class FileRounding(Module):
    """Marks in a traced graph that a file rounds the value here; it passes the value on.

    Args:
        grid: the grid of the value.
    """

    def __init__(self, grid: StoredGrid) -> None:
        super().__init__()
        self.label, self.kind = grid.label, grid.kind
        self.scales = grid.scale.tolist()
        self.zero_points = grid.zero_point.tolist()

    @property
    def grid(self) -> StoredGrid:
        """The grid of the value."""
        scale, zero = np.asarray(self.scales, np.float32), np.asarray(self.zero_points, np.int64)
        return StoredGrid(self.label, self.kind, scale, zero)

    def forward(self, x: Tensor) -> Any:
        """Returns ``x``."""
        return x


# The schemes of given grids: integer types and zero points as a `QScheme` says them.

_BITS = {f"{sign}int{bits}": (bits, not sign) for bits in (2, 4, 8, 16) for sign in ("", "u")}


class Schemes:
    """Chooses the scheme of each grid.

    A scheme is symmetric if all grids of its kind in the file are: one zero point of 0 may be chance.

    Args:
        activations: all grids of activations.
        parameters: path -> grid of the parameters.
    """

    def __init__(self, activations: Sequence[StoredGrid], parameters: Mapping[str, StoredGrid]) -> None:
        signed = [grid for grid in activations if grid.kind in ("int8", "int16")]
        self._symmetric = bool(signed) and all(not grid.zero_point.any() for grid in signed)
        integers = [g for g in parameters.values() if g.kind == "int8" and g.integers is not None]
        lowest = [int(g.integers.min()) for g in integers if g.integers is not None and g.integers.size]
        self._narrow = bool(lowest) and min(lowest) > -128

    def activation(self, grid: StoredGrid) -> QScheme | None:
        """Returns the scheme of an activation; None if there is none."""
        if grid.kind not in _BITS or grid.scale.size != 1 or grid.scale.ndim:
            return None
        bits, signed = _BITS[grid.kind]
        return QScheme(bits=bits, signed=signed, symmetric=signed and self._symmetric)

    def weight(self, grid: StoredGrid) -> QScheme | None:
        """Returns the scheme of a stored tensor, without its axis; None if there is none."""
        if grid.kind not in _BITS:
            return None
        bits, signed = _BITS[grid.kind]
        middle = 0 if signed else 1 << (bits - 1)
        symmetric = bool(np.all(grid.zero_point == middle))
        narrow = signed and symmetric and bits == 8 and self._narrow
        return QScheme(bits=bits, signed=signed, symmetric=symmetric, narrow=narrow)


# Takes the marks of given roundings out of a graph, and remembers who reads which rounded value.


@dataclass(eq=False)
class Mark:
    """A rounding of the value of a node.

    Attributes:
        node: the node.
        grid: the grid.
        parent: the rounding whose result is rounded again; None for one of the value itself.
        readers: the ops that read the rounded value.
        leaves: whether the rounded value is an output of the graph.
    """

    node: TensorNode
    grid: StoredGrid
    parent: Mark | None
    readers: list[Expr] = field(default_factory=list)
    leaves: bool = False


def take_marks(model: TracedModule) -> dict[Node, list[Mark]]:
    """Removes the calls of `FileRounding` from a flat graph.

    Equal roundings of one value become one.

    Returns:
        node -> the roundings of its value, each after its parent.
    """
    marks: dict[Node, list[Mark]] = {}
    marked: dict[Node, Mark] = {}  # the result of a mark -> the mark
    calls = [expr for expr in exprs(model) if isinstance(owner(expr), FileRounding)]
    outputs = set(model.graph.outputs)
    for expr in calls:
        rounding = owner(expr)
        assert isinstance(rounding, FileRounding)
        source, result = expr.inputs[1], expr.outputs[0]
        parent = marked.get(source)
        node = parent.node if parent else source
        mark = _merged(marks.setdefault(node, []), Mark(node, rounding.grid, parent))
        marked[result] = mark
        mark.readers += [u for u in dict.fromkeys(result.users) if u not in calls and u not in mark.readers]
        mark.leaves |= result in outputs
    paths = [expr.inputs[0].expr.name for expr in calls if isinstance(expr.inputs[0].expr, GetAttr)]
    with GraphEditor(model) as editor:
        for expr in calls:
            editor.replace_uses(expr.outputs[0], expr.inputs[1])
            editor.remove(expr)
    for path in dict.fromkeys(paths):
        delete_attribute(model, path)
    return marks


def _merged(marks: list[Mark], new: Mark) -> Mark:
    """Returns an equal rounding of the same value, or ``new`` after it is added."""
    if new.parent is not None and new.parent.grid.equals(new.grid):
        return new.parent
    for mark in marks:
        if mark.parent is new.parent and mark.grid.equals(new.grid):
            return mark
    marks.append(new)
    return new


# Places one site for each given rounding, and decides from them which ops compute on integers.

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


def decide(roundings: FileRoundings) -> Annotation:
    """Returns the annotation with a site for each rounding of ``roundings``, and adds to its problems."""
    return _Decider(roundings).run()


class _Decider:
    """Walks the graph forwards; each rounding becomes a site or is carried by an op that moves integers."""

    def __init__(self, roundings: FileRoundings) -> None:
        self.file, self.model = roundings, roundings.model
        self.moves = read_view(self.model, roundings.config)
        self.backend, self.calls, self.choices = self.moves.backend, self.moves.calls, self.moves.choices
        self.schemes = Schemes(
            [m.grid for marks in roundings.marks.values() for m in marks], roundings.parameters
        )
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
                if isinstance(expr, GetAttr) and expr.name in self.file.parameters:
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
            roots = [m for m in self.file.marks.get(node, ()) if m.parent is None]
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
        marks = list(self.file.marks.get(node, ()))
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
        node, grid = expr.outputs[0], self.file.parameters[expr.name]
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
        self.grids[name] = self.file.stored[name] = grid
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
            self.file.stored[name] = grid
            self.weights.update(dict.fromkeys(layers, site))
        for grid in self.file.parameters.values():
            if grid.label not in used:
                self._problem(grid, "is a parameter of a layer that qtrace does not quantize")

    def _stored_nodes(self) -> Iterator[tuple[TensorNode, StoredGrid]]:
        for expr in self.moves.order:
            if isinstance(expr, GetAttr) and expr.name in self.file.parameters:
                yield expr.outputs[0], self.file.parameters[expr.name]

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
                self.file.stored[name] = grid
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
                choices[expr] = replace(choices[expr], output=choices[expr].activation.scheme)
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

    def _plan(self, scheme: QScheme, choice: Choice | None, weight: bool = False) -> Plan:
        config = self.file.config
        observer = config.weight_observer if weight else config.activation_observer
        if choice is not None:
            observer = (choice.weight if weight else choice.activation).observer
        return RoundingChoice(scheme, observer, config.effective_fakequant).plan(scheme)

    def _register(self, preferred: str, qparams: QParams, grid: StoredGrid) -> str:
        name = free_name(preferred, self.names, self.moves.node_names)
        self.names.add(name)
        self.file.qparams[name] = qparams
        self.file.labels[name] = grid.label
        return name

    def _problem(self, grid: StoredGrid, reason: str) -> None:
        self.file.problems.append(f"{grid.label} {reason}")


def quantize_as_file(traced: TracedModule, parameters: Mapping[str, StoredGrid]) -> TracedModule:
    """Makes a prepared module whose sites and quantization parameters are exactly the given ones.

    Args:
        traced: a traced module; calls of `FileRounding` stand where activations are rounded.
        parameters: path of a parameter -> the grid of its values, and the integers of a bias.

    Returns:
        A calibrated module in the phase ``quantize``, as after ``prepare`` and ``calibrate``.

    Raises:
        GraphError: when roundings lack an equal site, or re-quantized values have other integers than the
            given ones; the message names all of them.
    """
    config = QConfig()
    model = flatten(traced)
    expanded = expand(model)
    marks = take_marks(model)
    roundings = FileRoundings(model, marks, parameters, config)
    annotation = decide(roundings)
    _refuse(roundings.problems)
    insert(model, annotation)
    check(model)
    log = (*expanded.changed, *(f"left: {reason}" for reason in expanded.left))
    write_record(model, Record("prepared", annotation, config.to_dict(), log))
    view = QuantizedModel(model, "prepared")
    for name, fake_quant in view.fake_quants.items():
        fake_quant.set_qparams(roundings.qparams[name])
    _refuse(_changed_integers(view, roundings))
    switch_phase("quantize", view)
    return model


def _changed_integers(view: QuantizedModel, roundings: FileRoundings) -> list[str]:
    """Returns a sentence for each site whose parameters or integers are not the given ones."""
    problems = []
    for name, fake_quant in view.fake_quants.items():
        if fake_quant.qparams() != roundings.qparams[name]:
            problems.append(f"{roundings.label(name)} has a scale that is too small for float32 arithmetic")
    stored = [site for site in view.sites if site.static and site.name in roundings.stored]
    values = evaluate_fixed(view.module, (site.node for site in stored))
    for site in stored:
        grid = roundings.stored[site.name]
        if not _keeps(site, values[site.node].numpy(), grid):
            scales = "the product of the scales of input and weight" if site.sort == "bias" else "its scale"
            problems.append(f"{grid.label} has other integers when its values are divided by {scales}")
    return problems


def _keeps(site: QuantizedSite, value: np.ndarray, grid: StoredGrid) -> bool:
    """Returns whether re-quantizing the stored floats gives the integers again."""
    integers = site.integers(value)
    if site.sort == "bias":
        return grid.integers is not None and np.array_equal(integers.reshape(-1), grid.integers.reshape(-1))
    qparams: QParams = site.qparams
    if qparams.scheme.block is not None:
        scale, zero = expand_blocks(qparams, value.shape)
    elif not qparams.scheme.per_channel:
        scale, zero = qparams.scale, qparams.zero_point
    else:
        axes = site.fake_quant.counted_axes
        shape = [n if axis in axes else 1 for axis, n in enumerate(value.shape)]
        scale, zero = qparams.scale.reshape(shape), qparams.zero_point.reshape(shape)
    again = ((integers - zero).astype(np.float32) * scale).astype(np.float32)
    return np.array_equal(again, value)


def _refuse(problems: list[str]) -> None:
    if problems:
        shown = shorten_list(problems, "; ", SHOWN_LINES)
        raise GraphError(f"{len(problems)} roundings lack an equal site: {shown}.")

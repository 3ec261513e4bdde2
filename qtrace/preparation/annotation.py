"""The decisions of `annotate` as frozen data that can be printed, saved and executed."""

from __future__ import annotations

import json
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from megengine.module import Identity
from pydantic import ConfigDict

from qtrace.display import format_bytes
from qtrace.graph.failures import Saved
from qtrace.graph.walk import unused_name
from qtrace.scheme import QScheme

Sort = Literal["activation", "weight", "bias"]
Preference = Literal["speed", "balanced", "accuracy"]
"""What a user prefers: all that gains time on integers, what is worth its noise, or float."""
DYNAMIC = "uint8 affine, by the range of each batch"
"""What a layer with method ``dynamic`` asks for at its input, as `ExprNote.asks` has it."""

_ROUNDED = "_q"
_DERIVED = (_ROUNDED, "_int")
_RESERVED = frozenset(dir(Identity()))


def free_name(name: str, used_names: Container[str], nodes: Container[str] = ()) -> str:
    """Returns ``name``, with a number appended if it is in ``used_names`` or an attribute of every module.

    Args:
        name: the preferred name.
        used_names: the names of other sites, or of other attributes.
        nodes: the names of the nodes of the graph: neither the rounded value of the site nor its integers in
            a file may have the name of another node.
    """

    def is_used(free: str) -> bool:
        return free in used_names or free in _RESERVED or any(f"{free}{end}" in nodes for end in _DERIVED)

    return unused_name(name, is_used)


def value_name(site: str) -> str:
    """Returns the name of the node that holds the rounded value of the site with the name ``site``."""
    return f"{site}{_ROUNDED}"


def site_name(value: str) -> str:
    """Inverts `value_name`; returns the name of any other node unchanged."""
    return value.removesuffix(_ROUNDED)


@dataclass(frozen=True)
class Plan(Saved):
    """The scheme, observer and fake quant of a site, with their options.

    Attributes:
        scheme: the scheme.
        observer: name of the observer.
        observer_options: options of the observer as sorted pairs.
        fakequant: name of the fake quant.
        fakequant_options: options of the fake quant as sorted pairs.
    """

    scheme: QScheme
    observer: str
    observer_options: tuple[tuple[str, Any], ...]
    fakequant: str
    fakequant_options: tuple[tuple[str, Any], ...]

    def describe(self) -> str:
        """Describes the plan in a line such as ``uint8 affine, mse(bins=2048), fixed``; one line per plan."""
        parts = ((self.observer, self.observer_options), (self.fakequant, self.fakequant_options))
        plugins = (f"{n}({', '.join(f'{k}={v}' for k, v in o)})" if o else n for n, o in parts)
        return ", ".join((self.scheme.describe(), *plugins))


@dataclass(frozen=True)
class Site(Saved):
    """One quantized tensor.

    Attributes:
        name: the name of the site.
        sort: activation, weight or bias.
        node: the name of the node whose value is quantized.
        consumers: names of the first outputs of the exprs that read the quantized value; None for all.
        group: the site whose parameters this site shares; its own name unless tied.
        plan: scheme, observer and fake quant; None for a bias, which has its layer's scale.
        channel_axes: for a per-channel site, the axes of the node that count channels.
        static: whether the value is a parameter.
        activation: for a bias, the group of the layer's input.
        weight: for a bias, the group of the layer's weight.
        factor: for a bias, the factor of the scale of ``activation`` where the layer reads it.
    """

    name: str
    sort: Sort
    node: str
    consumers: tuple[str, ...] | None
    group: str
    plan: Plan | None
    channel_axes: tuple[int, ...] = ()
    static: bool = False
    activation: str = ""
    weight: str = ""
    factor: float = 1.0


@dataclass(frozen=True)
class Fold(Saved):
    """A layer whose BatchNorm stays in the graph and is folded whenever it does not train.

    Attributes:
        layer: name of the layer's output.
        norm: name of the BatchNorm's output.
        weight: the weight's site.
        activation: the group of the layer's input, "" for a float one.
    """

    layer: str
    norm: str
    weight: str
    activation: str


@dataclass(frozen=True)
class DynamicInput(Saved):
    """A value that layers round by the range of each batch.

    Attributes:
        name: the name of its module in the graph.
        node: the name of the node whose value is rounded.
        consumers: names of the first outputs of the layers that read the rounded value.
    """

    name: str
    node: str
    consumers: tuple[str, ...]


@dataclass(frozen=True)
class ExprNote(Saved):
    """The decision for one expr, with its reason.

    Attributes:
        name: name of the expr's first output.
        op: the module, function or method that the expr calls.
        kind: the op kind, or "" without a rule.
        role: the role of the op kind, or "" without a rule.
        path: path of the module that recorded the expr.
        state: "int" (computed on integers), "fused" (into ``into``), "carried", "float", or "shape"
            (integers, shapes, and what is computed only from them and constants).
        into: name of the op that the expr is fused into.
        inputs: the site or group of each input, "" for a float one.
        reads: the names of these inputs, and of the other tensors that the expr reads, such as shapes.
        gives: the names of the expr's outputs.
        asks: the parameters that the expr asks for at its inputs, in words; "" if it asks for none.
        output: the group of the first output, "" for a float one.
        scheme: the output's scheme in words.
        weight: the weight's site.
        rule: the op rule, file and line.
        matched: the config rules that matched, file and line.
        ranks: the numbers of these rules in the config.
        causes: codes of everything that keeps the expr in float; `reason` states the first.
            ``unread``: no rule reads it. ``region``: it lies outside. ``range``: one grid would spoil a part
            of what it reads or gives. ``selection``: it ranks rows, or computes with rows that are selected.
            ``infinity``: it has a number that no integer stands for. ``rule``: a rule of the config.
            ``role``: it is kept in float on purpose. ``dtype``: it has values other than float32.
            ``kernel``: the backend lacks one. ``speed``: the backend says that integers are no faster.
            ``placement``: it gains too little on integers. ``method``: the config's method rounds only its
            weight, or nothing. ``idle``: it moves floats.
        reason: why the expr stays float, or a remark about how it is computed.
        macs: number of multiply-accumulates at the traced shapes.
        island: the number of the float island that the expr belongs to; 0 for none. An island is a
            connected part of the graph that stays float between integers.
    """

    name: str
    op: str
    kind: str
    role: str
    path: str
    state: str
    into: str = ""
    inputs: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    gives: tuple[str, ...] = ()
    asks: str = ""
    output: str = ""
    scheme: str = ""
    weight: str = ""
    rule: str = ""
    matched: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    causes: tuple[str, ...] = ()
    reason: str = ""
    macs: int = 0
    island: int = 0


@dataclass(frozen=True)
class PlacementRow(Saved):
    """One of the placements that a calibrated graph chooses from.

    Attributes:
        name: "fastest", "balanced" or "float".
        speed: how many times as fast as float it is predicted to be.
        sqnr: the measured SQNR of the worst group of columns of an output in dB; None where nothing is lost.
        group: the name of this group.
        bytes: the bytes of its parameters.
    """

    name: str
    speed: float
    sqnr: float | None
    group: str
    bytes: int


@dataclass(frozen=True)
class PlacementNote:
    """The prediction of a placement, and what the calibrated graph has chosen from.

    Attributes:
        mode: "balanced", "fastest" or "small"; "float" where the whole graph stays in float.
        table: name of the measured times.
        milliseconds: predicted time of the graph, one thread.
        float_milliseconds: predicted time of the graph in float.
        times: name of an op -> its predicted milliseconds in float and on integers; None without a kernel.
        reasons: name of an op -> why it runs as it does.
        centred: whether ranges are symmetric where layers are slower if their input has a zero point, and the
            parts of a concat share theirs.
        rows: what the calibrated graph has chosen from, the fastest first; () before.
        chosen: the name of the row that was taken; "" before.
    """

    __pydantic_config__: ClassVar[ConfigDict] = {"extra": "ignore"}  # earlier versions had other figures

    mode: str
    table: str
    milliseconds: float
    float_milliseconds: float
    times: dict[str, tuple[float, float | None]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    centred: bool = False
    rows: tuple[PlacementRow, ...] = ()
    chosen: str = ""

    def choice_lines(self) -> list[str]:
        """Returns the rows as a table, the chosen one marked; nothing before there are any."""
        prefer = {"fastest": "prefer: speed", "balanced": "", "float": "prefer: accuracy"}
        lines = [f"{'choice':<12}  speed   SQNR      size"] if self.rows else []
        for row in self.rows:
            chosen = row.name == self.chosen
            sqnr = "-" if row.sqnr is None else f"{row.sqnr:.1f}"
            figures = f"{row.speed:>5.2f}x {sqnr:>6} {format_bytes(row.bytes):>9}"
            line = f"{'*' if chosen else ' '} {row.name:<10} {figures}"
            lines.append(line if chosen else f"{line}    {prefer[row.name]}".rstrip())
        return lines

    @property
    def conclusion(self) -> str:
        """Why the whole graph is in float; "" if it is not."""
        if self.mode != "float":
            return ""
        lost = [row for row in self.rows if row.sqnr is not None]
        if not lost:
            return "integers gain too little time"
        row = lost[-1]
        return f"the time that integers gain is not worth their noise ({row.group} has {row.sqnr:.1f} dB)"


@dataclass(frozen=True)
class Annotation(Saved):
    """All decisions for one graph.

    Attributes:
        backend: name of the backend.
        notes: one for each op expr, in graph order.
        sites: every site, in graph order.
        carried: node name -> group, for nodes whose values are integers of that group without rounding.
        folds: layers whose BatchNorm trains on.
        origins: file and line of each rule of the config, in order.
        inputs: the names of the graph's input tensors.
        outputs: the names of the graph's output tensors.
        factors: node name -> factor of its group's scale, for nodes of `carried` with another scale.
        placement: the predicted time and noise by which ops were left in float; None without a placement.
        dynamic: the values that are rounded by the range of each batch.
    """

    backend: str
    notes: tuple[ExprNote, ...]
    sites: tuple[Site, ...]
    carried: dict[str, str] = field(default_factory=dict)
    folds: tuple[Fold, ...] = ()
    origins: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    factors: dict[str, float] = field(default_factory=dict)
    placement: PlacementNote | None = None
    dynamic: tuple[DynamicInput, ...] = ()

    def moved(self) -> dict[str, str]:
        """Returns `carried` without the outputs of no-ops: the nodes that an export writes anew."""
        idle = {n.name for n in self.notes if n.kind in ("identity", "dropout")}
        return {name: group for name, group in self.carried.items() if name not in idle}

    def to_json(self) -> str:
        """Returns the annotation as a JSON document."""
        data = dict(vars(self))
        if self.placement is None:  # as in annotations of before there were placements, whose hashes stay
            del data["placement"]
        if not self.dynamic:
            del data["dynamic"]
        return json.dumps(data, default=_plain, sort_keys=True)  # asdict would copy every value first


def _plain(value: Any) -> dict[str, Any]:
    return value.to_dict() if isinstance(value, QScheme) else vars(value)

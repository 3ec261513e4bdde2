"""Measures the evidence of a diagnosis: one run in float, one quantized, and one for each suspect.

The evidence of each site: ranges and rounding errors of its channels, as frozen data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from qtrace import ops
from qtrace.comparing.runs import read_outputs
from qtrace.comparing.sums import LEAST_VARIATION
from qtrace.data.batches import evaluating
from qtrace.display import progress_bar
from qtrace.graph.interpreter import Interpreter, evaluate_fixed
from qtrace.graph.types import Node, TensorNode, TracedModule
from qtrace.graph.walk import exprs
from qtrace.numerics import fake_quantize
from qtrace.ops import OpCall
from qtrace.preparation.annotation import ExprNote
from qtrace.preparation.model import QuantizedModel, QuantizedSite
from qtrace.preparation.phases import in_phase
from qtrace.ptq.layers.quantized import LAYERS
from qtrace.ptq.layers.scaling import input_axes
from qtrace.scheme import QParams
from qtrace.sensitivity.simulation import Simulation


@dataclass(frozen=True)
class Channels:
    """Figures of each channel of a tensor.

    Attributes:
        low, high: the smallest and the largest value.
        power: the mean of the squared values; of a weight, weighted by the power of the inputs it multiplies.
        noise: the mean of the squared rounding errors, weighted in the same way.
        clipped: the part of ``noise`` by values outside of the quantized range.
        unseen: the mean of the squared distances of values to the range that calibration observed.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]
    power: tuple[float, ...]
    noise: tuple[float, ...]
    clipped: tuple[float, ...]
    unseen: tuple[float, ...]

    @property
    def magnitudes(self) -> np.ndarray:
        """The largest magnitude in each channel."""
        return np.maximum(np.abs(self.low), np.abs(self.high))

    @property
    def alive(self) -> np.ndarray:
        """Whether each channel has a power compared with the strongest channel."""
        power = np.asarray(self.power)
        return power > LEAST_VARIATION * max(float(power.max(initial=0.0)), float(np.finfo(np.float64).tiny))

    @property
    def relative_noise(self) -> np.ndarray:
        """The noise of each channel over its power, at most 1; 0 for dead channels."""
        power, noise = np.asarray(self.power), np.asarray(self.noise)
        alive = self.alive
        return np.where(alive, np.minimum(noise / np.where(alive, power, 1.0), 1.0), 0.0)

    @property
    def mean_relative_noise(self) -> float:
        """The mean of ``relative_noise`` over the channels that are not dead.

        The noise of the whole tensor hides that an outlier costs all other channels their precision.
        """
        alive = self.alive
        return float(self.relative_noise[alive].mean()) if alive.any() else 0.0

    def share_of_noise(self, part: tuple[float, ...]) -> float:
        """Returns how much of the relative noise of the channels is due to ``part`` of it, at most 1."""
        noise = np.asarray(self.noise)
        ratios = np.minimum(np.asarray(part) / np.where(noise > 0, noise, 1.0), 1.0)
        total = float(self.relative_noise.sum())
        return float((self.relative_noise * ratios).sum()) / total if total > 0 else 0.0


def join_channels(parts: list[Channels]) -> Channels:
    """Merges the figures of the same channels over several batches of equal size."""
    names = ("power", "noise", "clipped", "unseen")
    columns = {
        "low": np.min([part.low for part in parts], axis=0),
        "high": np.max([part.high for part in parts], axis=0),
        **{name: np.mean([getattr(p, name) for p in parts], axis=0) for name in names},
    }
    return Channels(**{name: tuple(map(float, values)) for name, values in columns.items()})


@dataclass(frozen=True)
class Branch:
    """An input of an op that joins tensors, whose channels share a range with the other inputs.

    Attributes:
        name: the name of the input's node.
        magnitude: its largest magnitude.
        relative_noise: the mean of its channels' noise over their power.
    """

    name: str
    magnitude: float
    relative_noise: float


@dataclass(frozen=True)
class SiteEvidence:
    """The measurements of one site.

    Attributes:
        site: the name of the site.
        sort: activation or weight.
        kind: the kind of op that computes an activation or reads a weight; "" for an input of the graph.
        op: the name of that op; "" for an input of the graph.
        group: the group whose parameters the site has.
        scheme: the scheme in words.
        bits: the bits of the scheme.
        per_channel: whether each channel has a scale of its own.
        observer: the name of the observer that chose the range; "" if unknown.
        lo, hi: the smallest and the largest value that the integers stand for.
        observed: the smallest and the largest value in calibration; None if the model does not hold them.
        channels: the figures of each channel, measured on the evaluation data.
        branches: the inputs of an op that joins tensors, or the members of the site's group.
        readers: (name, kind) of the ops that read the site.
        inputs: for a weight, the figures of each input channel.
        dead_inputs: for a weight, how many input channels are 0 in all samples.
        dead_magnitude, live_magnitude: for a weight, the largest magnitude at dead and at live input
            channels, as the median over output channels.
        output_noise: noise power over the power of the outputs if only the site's group is rounded; None if
            it was not measured.
    """

    site: str
    sort: str
    kind: str
    op: str
    group: str
    scheme: str
    bits: int
    per_channel: bool
    observer: str
    lo: float
    hi: float
    observed: tuple[float, float] | None
    channels: Channels
    branches: tuple[Branch, ...] = ()
    readers: tuple[tuple[str, str], ...] = ()
    inputs: Channels | None = None
    dead_inputs: int = 0
    dead_magnitude: float = 0.0
    live_magnitude: float = 0.0
    output_noise: float | None = None

    @property
    def clipped_share(self) -> float:
        """The share of the channels' relative noise by values outside of the quantized range."""
        return self.channels.share_of_noise(self.channels.clipped)

    @property
    def unseen_share(self) -> float:
        """The share of the channels' relative noise by values outside of what calibration observed."""
        return self.channels.share_of_noise(self.channels.unseen)

    @property
    def beyond_observed(self) -> float:
        """How far values lie outside of what calibration observed, as a share of the observed range."""
        if self.observed is None:
            return 0.0
        low, high = self.observed
        width = max(high - low, float(np.finfo(np.float32).tiny))
        excess = max(low - min(self.channels.low), max(self.channels.high) - high, 0.0)
        return excess / width


_JOINS = ("concat", "stack")


def measure_sites(model: QuantizedModel, twin: TracedModule, batches: Sequence[Any]) -> list[SiteEvidence]:
    """Measures every site of activations and weights on what the float graph computes.

    Args:
        model: the view of a calibrated module.
        twin: the float network with the graph's nodes, or the module itself.
        batches: a few small batches.

    Returns:
        The evidence of each site, in the order of the sites.
    """
    rounded = [
        site for site in model.rounded.values() if site.sort != "bias" and not site.qparams.scheme.bits > 16
    ]
    moving = {site.node.name: site for site in rounded if not site.static}
    calls = _layers(model)
    run = _ChannelRun(twin, moving, {call.inputs[0].name: call for call in calls.values()})
    with in_phase(twin, "float"), evaluating(twin):
        for index, batch in enumerate(batches):
            read_outputs(run, batch, index)
    weights = _WeightMeasurement(model, twin, calls, run.powers())
    notes = {name: note for note in model.annotation.notes for name in note.gives}
    measured: dict[str, SiteEvidence] = {}
    for site in rounded:
        if site.name in run.parts:
            measured[site.name] = _activation(model, site, join_channels(run.parts[site.name]), notes)
        elif site.name in calls and site.static:
            measured[site.name] = weights.measure(site)
    return [_with_branches(model, evidence, measured, notes) for evidence in measured.values()]


def measure_output_noise(
    simulation: Simulation, evidence: Sequence[SiteEvidence], groups: Sequence[str], progress: bool = False
) -> list[SiteEvidence]:
    """Measures what rounding only each of ``groups`` costs at the outputs, by a run of the graph for each.

    Args:
        simulation: the graph on the evaluation data.
        evidence: all sites.
        groups: the groups to measure.
        progress: whether to show a progress bar on stderr.

    Returns:
        The evidence, with the noise of the measured groups.
    """
    measured = simulation.only_groups(groups)
    bar = progress_bar(measured, total=len(groups), desc="verdict", unit="site", disable=not progress)
    noise = {group: float(10 ** (-decibels / 10)) for group, decibels in zip(groups, bar, strict=True)}
    return [replace(e, output_noise=noise[e.group]) if e.group in noise else e for e in evidence]


class _ChannelRun(Interpreter):
    """Measures the channels of every site while the graph runs in float; keeps no value."""

    def __init__(self, twin: TracedModule, sites: dict[str, QuantizedSite], read: dict[str, OpCall]) -> None:
        super().__init__(twin)
        self.sites, self.read = sites, read
        self.parts: dict[str, list[Channels]] = {}
        self.squares: dict[str, list[np.ndarray]] = {}

    def on_node(self, node: Node, value: Any) -> Any:
        if isinstance(node, TensorNode) and (node.name in self.sites or node.name in self.read):
            exact = value.numpy()
            if exact.size and exact.dtype.kind == "f":
                self._measure(node.name, exact)
        return value

    def _measure(self, name: str, exact: np.ndarray) -> None:
        if name in self.sites:
            site = self.sites[name]
            self.parts.setdefault(site.name, []).append(_channels(exact, site.qparams, _observed(site)))
        if name in self.read:
            rows = _rows(exact, -1 if self.read[name].kind == "linear" else 1)
            self.squares.setdefault(name, []).append(_powers(rows))

    def powers(self) -> dict[str, np.ndarray]:
        """Returns the power of each input channel of each layer, by the name of the input's node."""
        return {name: np.mean(parts, axis=0) for name, parts in self.squares.items()}


def _rows(value: np.ndarray, axis: int) -> np.ndarray:
    if value.ndim < 2:
        return value.reshape(1, -1)
    return np.moveaxis(value, axis, 0).reshape(value.shape[axis], -1)


def _ends(qparams: QParams) -> tuple[np.ndarray, np.ndarray]:
    scheme, zero_point = qparams.scheme, qparams.zero_point.astype(np.float64)
    return (scheme.qmin - zero_point) * qparams.scale, (scheme.qmax - zero_point) * qparams.scale


def _channels(exact: np.ndarray, qparams: QParams, observed: tuple[float, float] | None) -> Channels:
    """Computes the figures of the channels of an activation; the last axis of three counts channels."""
    axis = qparams.scheme.axis if qparams.scheme.per_channel else -1 if exact.ndim == 3 else 1
    error, rows = (_rows(part, axis or 0) for part in (fake_quantize(exact, qparams) - exact, exact))
    ends, (lo, hi) = (rows.min(axis=1), rows.max(axis=1)), _ends(qparams)
    clipped = unseen = np.zeros(len(rows))
    # Most values lie within both ranges, which the ends of the channels tell.
    if (ends[0] < lo).any() or (ends[1] > hi).any():
        clipped = _powers(error, where=(rows < lo.reshape(-1, 1)) | (rows > hi.reshape(-1, 1)))
    if observed is not None and (ends[0].min() < observed[0] or ends[1].max() > observed[1]):
        unseen = _powers(rows - np.clip(rows, *observed))
    return _as_channels(*ends, _powers(rows), _powers(error), clipped, unseen)


def _powers(rows: np.ndarray, where: np.ndarray | None = None) -> np.ndarray:
    """Returns the mean square of each row, of the values that ``where`` names; other values count as 0."""
    kept = rows if where is None else np.where(where, rows, 0)
    # Not by BLAS, whose sums depend on the number of threads.
    return np.einsum("cn,cn->c", kept, kept, dtype=np.float64) / max(rows.shape[1], 1)


def _as_channels(*columns: np.ndarray) -> Channels:
    """Builds the figures of channels from an array of each, in the order of the fields."""
    return Channels(*(tuple(map(float, column)) for column in columns))


def _of_weights(rows: np.ndarray, *parts: np.ndarray) -> Channels:
    """Builds the figures of channels from their values, and their powers and noises value by value."""
    return _as_channels(rows.min(axis=1), rows.max(axis=1), *(part.mean(axis=1) for part in parts))


def _activation(
    model: QuantizedModel, site: QuantizedSite, channels: Channels, notes: dict[str, ExprNote]
) -> SiteEvidence:
    note = notes.get(site.node.name)
    lo, hi = _ends(site.qparams)
    names = {site.node.name, "" if site.value is None else site.value.name}
    readers = [
        (n.name, n.kind)
        for n in model.annotation.notes
        if names & set(n.reads) or site.group in n.inputs
        if site.decision.consumers is None or n.name in site.decision.consumers
    ]
    return SiteEvidence(
        site.name,
        site.sort,
        "" if note is None else note.kind,
        "" if note is None else note.name,
        site.group,
        site.qparams.scheme.describe(),
        site.qparams.scheme.bits,
        site.qparams.scheme.per_channel,
        _observer_name(site),
        float(np.min(lo)),
        float(np.max(hi)),
        _observed(site),
        channels,
        readers=tuple(readers),
    )


def _observer_name(site: QuantizedSite) -> str:
    return "" if site.plan is None else site.plan.observer


def _observed(site: QuantizedSite) -> tuple[float, float] | None:
    """Returns the range that the site's observer saw; None if it holds none."""
    observer = getattr(site.fake_quant, "observer", None)
    state = {} if observer is None else observer.state_dict()
    if "lo" not in state or "hi" not in state:
        return None
    return float(np.min(state["lo"])), float(np.max(state["hi"]))


def _with_branches(
    model: QuantizedModel,
    evidence: SiteEvidence,
    known: dict[str, SiteEvidence],
    notes: dict[str, ExprNote],
) -> SiteEvidence:
    """Adds the inputs of a concatenation, or the sites that share the range, as branches."""
    if evidence.sort != "activation":
        return evidence
    members = [known[s.name] for s in model.groups[evidence.group] if s.name in known]
    note = notes.get(evidence.site)
    if len(members) > 1:
        branches = [
            Branch(m.site, float(m.channels.magnitudes.max()), m.channels.mean_relative_noise)
            for m in members
        ]
    elif evidence.kind in _JOINS and note is not None:
        branches = _joined(model, evidence, note)
    else:
        return evidence
    return replace(evidence, branches=tuple(branches))


def _joined(model: QuantizedModel, evidence: SiteEvidence, note: ExprNote) -> list[Branch]:
    """Splits the channels of a concatenation by its inputs; gives none where it is along another axis."""
    nodes = [model.nodes[name] for name in note.reads if name in model.nodes]
    widths = [int(node.shape[1]) if node.shape is not None and len(node.shape) > 1 else 0 for node in nodes]
    magnitudes, noise = evidence.channels.magnitudes, evidence.channels.relative_noise
    if sum(widths) != len(magnitudes) or not all(widths):
        return []
    ends = np.cumsum([0, *widths])
    return [
        Branch(node.name, float(magnitudes[a:b].max()), float(noise[a:b].mean()))
        for node, a, b in zip(nodes, ends[:-1], ends[1:], strict=True)
    ]


def _layers(model: QuantizedModel) -> dict[str, OpCall]:
    """Maps the name of each weight's site to the first layer that reads it."""
    calls: dict[str, OpCall] = {}
    for expr in exprs(model.module):
        call = ops.read(expr)
        if call is None or call.kind not in LAYERS or call.weight is None:
            continue
        site = model.rounded.get(call.weight.name)
        if site is not None:
            calls.setdefault(site.name, call)
    return calls


class _WeightMeasurement:
    """Measures the rounding errors of weights, weighted by the power of the inputs that they multiply."""

    def __init__(
        self,
        model: QuantizedModel,
        twin: TracedModule,
        calls: dict[str, OpCall],
        powers: dict[str, np.ndarray],
    ) -> None:
        self.calls, self.powers = calls, powers
        sites = [site for site in model.rounded.values() if site.name in calls and site.static]
        names = {site.node.name for site in sites}
        nodes = {n.name: n for expr in exprs(twin) for n in expr.outputs if n.name in names}
        own = evaluate_fixed(model.module, (site.node for site in sites))
        exact = evaluate_fixed(twin, nodes.values())
        self.stored = {site.name: own[site.node].numpy() for site in sites}
        self.exact = {s.name: exact[nodes[s.node.name]].numpy() for s in sites if s.node.name in nodes}

    def measure(self, site: QuantizedSite) -> SiteEvidence:
        """Returns the evidence of a weight."""
        call, stored = self.calls[site.name], self.stored[site.name]
        exact = self.exact.get(site.name, stored)
        outputs, inputs = call.channel_axes, input_axes(call)
        power = self._input_power(call, exact, inputs)
        error = self._dequantized(site, stored) - exact
        lo, hi = _ends(site.qparams)
        signal, noise = (np.square(part, dtype=np.float64) * power for part in (exact, error))
        none = np.zeros_like(noise)
        channels, by_input = (
            _of_weights(*(_by_axes(part, axes) for part in (exact, signal, noise, none, none)))
            for axes in (outputs, inputs)
        )
        dead = np.broadcast_to(power, exact.shape) <= 0.0
        count = int(np.sum(power <= 0.0))
        at_dead, at_live = (_by_axes(np.abs(exact) * mask, outputs).max(axis=1) for mask in (dead, ~dead))
        return SiteEvidence(
            site.name,
            site.sort,
            call.kind,
            call.out.name,
            site.group,
            site.qparams.scheme.describe(),
            site.qparams.scheme.bits,
            site.qparams.scheme.per_channel,
            _observer_name(site),
            float(np.min(lo)),
            float(np.max(hi)),
            (float(exact.min()), float(exact.max())),
            channels,
            readers=((call.out.name, call.kind),),
            inputs=by_input,
            dead_inputs=count,
            dead_magnitude=float(np.median(at_dead)),
            live_magnitude=float(np.median(at_live)),
        )

    def _input_power(self, call: OpCall, weight: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
        """Returns the power of the inputs in a shape that multiplies the weight; 1 where it is not known."""
        power = self.powers.get(call.inputs[0].name)
        shape = [n if i in axes else 1 for i, n in enumerate(weight.shape)]
        if power is None or power.size != int(np.prod(shape)):
            return np.ones([1] * weight.ndim)
        return power.reshape(shape)

    @staticmethod
    def _dequantized(site: QuantizedSite, stored: np.ndarray) -> np.ndarray:
        fake_quant, qparams = site.fake_quant, site.qparams
        if not qparams.scheme.per_channel or qparams.scheme.block is not None:
            return fake_quantize(stored, qparams)
        axes = fake_quant.counted_axes
        moved = np.moveaxis(stored, axes, range(len(axes)))
        rows = moved.reshape(int(np.prod(moved.shape[: len(axes)])), -1)
        flat = QParams(qparams.scheme.replace(axis=0), qparams.scale, qparams.zero_point)
        return np.moveaxis(fake_quantize(rows, flat).reshape(moved.shape), range(len(axes)), axes)


def _by_axes(value: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    moved = np.moveaxis(value, axes, range(len(axes)))
    return moved.reshape(int(np.prod(moved.shape[: len(axes)])), -1)

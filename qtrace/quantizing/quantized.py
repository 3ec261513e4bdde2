"""The result of the one call: the file, its verdict, and what became of each op."""

from __future__ import annotations

import datetime
import math
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from qtrace.benchmarking.latency import file_size
from qtrace.config.recipe import dump_recipe
from qtrace.display import Displayed, format_bytes
from qtrace.graph.interface import read_inputs
from qtrace.graph.signature import list_inputs
from qtrace.graph.types import TracedModule
from qtrace.inspection.explanation import Explanation, explain
from qtrace.preparation.annotation import PlacementNote
from qtrace.preparation.figures import read_figures
from qtrace.preparation.model import QuantizedModel
from qtrace.preparation.precision import count_precisions
from qtrace.preparation.record import fake_quants, read_record
from qtrace.quantizing.card import Card, FloatOps
from qtrace.quantizing.delivering import Delivery
from qtrace.quantizing.judging import Judgement
from qtrace.runtimes.host import RuntimeHost
from qtrace.sensitivity.diagnosis import SiteEvidence
from qtrace.sensitivity.diagnosis.verdict import Verdict
from qtrace.verification.report import VerifyReport

__all__ = ["Quantized"]

_PACKAGES = ("qtrace", "megengine", "numpy", "onnx", "onnxruntime", "openvino", "ai-edge-litert", "ncnn")
_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e-?\d+)?")
_BARS = 10  # layers that are drawn, so that the card stays one page


@dataclass(frozen=True, repr=False)
class Quantized(Displayed):
    """The result of ``qtrace.quantize``.

    Attributes:
        path: the file.
        judgement: the verdict with its causes, and the recipe that cures them.
        verify: the report of the file's run beside the graph; None if it was not run.
        prepared: the calibrated graph, to be trained on.
        converted: the graph that was exported, in float if `delivery` says so.
        raised: the layers that stay in float to keep the metric.
        traced: the float network.
        data: the name of the calibration data.
        delivery: what was measured of the quantized file beside float, and which of both was written: float
            if it is faster here, unless the config asks for the quantized one.
        seconds: name of a stage -> its time in seconds.
        runtime_host: the interpreter or machine that has the runtime; None for this one.
    """

    path: Path
    judgement: Judgement
    verify: VerifyReport | None
    prepared: TracedModule
    converted: TracedModule
    raised: tuple[str, ...] = ()
    traced: TracedModule | None = None
    data: str = ""
    delivery: Delivery = field(default_factory=Delivery)
    seconds: Mapping[str, float] = field(default_factory=dict)
    runtime_host: RuntimeHost | None = None

    @cached_property
    def card(self) -> Card:
        """The card of the file, for people who take it."""
        return _make_card(self)

    def _text(self, max_width: int | None) -> str:
        return "\n".join(self.summary())

    @property
    def verdict(self) -> Verdict | None:
        """The verdict on the calibrated graph; None if it could not be judged.

        If `delivery` says that the file is in float, it is that of the quantized graph, which was left out.
        """
        return self.judgement.verdict

    def explain(self) -> Explanation:
        """Explains what became of each op of the file, as ``qtrace.explain`` does."""
        return explain(self.delivery.prepared or self.prepared)

    def to_dict(self) -> dict[str, Any]:
        """Returns verdict, causes and what was measured, for JSON; apart, those of a graph left out."""
        judged = self.judgement.to_dict()
        if self.delivery.in_float:
            judged = {"quantized_and_not_written": judged}
        return {**judged, **self.delivery.to_dict()}

    @property
    def placement(self) -> PlacementNote | None:
        """The placements that the calibrated graph has chosen from; None if it had no choice."""
        return read_record(self.prepared).annotation.placement

    def summary(self) -> list[str]:
        """Returns the file and `lines`."""
        return [str(self.path), *self.lines()]

    def lines(self) -> list[str]:
        """Returns the verdict with its causes, the choice, the speed, and what the runtime computed."""
        diagnosis, sentence = self.judgement.diagnosis, self.delivery.sentence()
        measured = sentence.removeprefix("speed: ").replace("not measured, ", "no: ", 1)
        judged = ["no verdict"] if diagnosis is None else diagnosis.lines()
        judged = [*judged, *self._open_sizes()]
        if not any(fake_quants(self.prepared)):
            judged.append("  no op of the file is on integers: `explain()` says why for each")
        if self.raised:
            judged.append(f"  in float to keep the metric: {', '.join(self.raised)}")
        if self.delivery.in_float:
            judged.insert(1, "  of the quantized file, which was not written")
        speed = [f"measured  {measured}"] if measured else []
        choice = [] if self.placement is None else self.placement.choice_lines()
        growth = [self.delivery.growth] if self.delivery.growth else []
        return [*judged, *choice, *speed, *growth, *self._verified()]

    def _verified(self) -> list[str]:
        """Says what the runtime computed."""
        if self.verify is None:
            return ["verified  no, the file was not run"]
        client = [f"  {self.verify.client}"] if self.verify.client else []
        if not self.verify.sites["op_by_op"]:
            return ["verified  the runtime computes what the graph computes", *client]
        share, worst = self.verify.equal_share(), self.verify.worst_lsb()
        equal = f"{share:.4%} of the integers equal the graph's, the others are {worst} LSB off at most"
        return [f"verified  {equal}" if worst else "verified  every integer equals the graph's", *client]

    def _open_sizes(self) -> list[str]:
        """Returns a line for each input whose sizes the network leaves open, with those of the data."""
        if self.traced is None or not (inputs := read_inputs(self.traced)):
            return []
        shapes = ("x".join(map(str, shape[1:])) for _, shape in list_inputs(self.traced))
        return [
            f"  size: {info.name} is {shape} in the first batch, and open in the network"
            for info, shape in zip(inputs.values(), shapes, strict=True)
            if info.sizes and None in info.sizes[1:]
        ]


def _make_card(result: Quantized) -> Card:
    """Makes the card of the file of ``qtrace.quantize``, with the numbers that the call has measured."""
    assert result.traced is not None
    delivery, diagnosis = result.delivery, result.judgement.diagnosis
    view, figures = QuantizedModel(result.converted), read_figures(result.converted)
    precision = count_precisions(view.annotation)
    inputs = {name: tuple(map(int, shape)) for name, shape in list_inputs(result.traced)}
    sizes = file_size(result.path), figures.bytes, figures.float_bytes
    in_float = delivery.in_float or diagnosis is None
    share = figures.integer_macs / max(figures.macs, 1)
    numbers = {
        "network": str(result.traced.graph._qualname),
        "target": view.config.backend,
        "data": result.data,
        "precision": dict(precision),
        "inputs": {name: list(shape) for name, shape in inputs.items()},
        **dict(zip(("bytes", "parameter_bytes", "float_parameter_bytes"), sizes, strict=True)),
        "macs": figures.macs,
        "integer_macs": figures.integer_macs,
        "worst_lsb": None if result.verify is None else result.verify.worst_lsb(),
        **delivery.to_dict(),
    }
    layers = sum(precision.values())
    size, stored, float_stored = map(format_bytes, sizes)
    facts = {
        "network": numbers["network"],
        "inputs": ", ".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in inputs.items()),
        "target": view.config.backend,
        "precision": ", ".join(f"{name} in {count} of {layers} layers" for name, count in precision.items()),
        "size": f"{size}; parameters {stored}, {float_stored} in float",
        "MACs": f"{figures.macs:,}, {share:.1%} on integers",
        "data": result.data,
        "made": f"{_today()}, {', '.join(f'{name} {number}' for name, number in _versions().items())}",
        "stages": ", ".join(f"{name} {seconds:.1f} s" for name, seconds in result.seconds.items()),
    }
    return Card(
        result.path.name,
        tuple(result.lines()),
        result.placement,
        None if in_float else result.verdict,
        {} if in_float or diagnosis is None else _noise(diagnosis.sites),
        _group_floats(result.explain()),
        {name: text for name, text in facts.items() if text},
        numbers,
        dump_recipe(view.config),
        {"made": _today(), "versions": _versions(), "stage_seconds": dict(result.seconds)},
    )


def _noise(sites: Sequence[SiteEvidence]) -> dict[str, float]:
    """Returns each layer's share of the noise at the outputs; of all roundings if no run measured that."""
    measured = [site for site in sites if site.output_noise is not None] or sites
    noise: dict[str, float] = {}
    for site in measured:
        own = site.channels.mean_relative_noise if site.output_noise is None else site.output_noise
        if math.isfinite(own):
            noise[site.op or site.site] = max(noise.get(site.op or site.site, 0.0), own)
    total = sum(noise.values())
    largest = sorted(noise.items(), key=lambda item: -item[1])[:_BARS]
    return {name: own / total for name, own in largest if own > 0.0}


def _group_floats(explanation: Explanation) -> tuple[FloatOps, ...]:
    """Returns the ops in float, those together whose reasons differ in numbers alone, which become ranges."""
    kinds: dict[tuple[str, ...], dict[str, int]] = {}
    numbers: dict[tuple[str, ...], list[list[str]]] = {}
    for entry in explanation.to_dict()["summary"]["floats"]:
        words = tuple(_NUMBER.split(entry["reason"]))
        numbers.setdefault(words, []).append(_NUMBER.findall(entry["reason"]))
        own = kinds.setdefault(words, {})
        for kind, count in entry["kinds"].items():
            own[kind] = own.get(kind, 0) + count
    return tuple(FloatOps(own, _with_ranges(words, numbers[words])) for words, own in kinds.items())


def _with_ranges(words: Sequence[str], numbers: Sequence[Sequence[str]]) -> str:
    """Returns the words with a number, or the range of several, between each two."""
    text = words[0]
    for word, column in zip(words[1:], zip(*numbers, strict=True), strict=True):
        low, high = min(column, key=float), max(column, key=float)
        text += (low if low == high else f"{low} to {high}") + word
    return text


def _today() -> str:
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:  # an extra that is not installed
            continue
    return versions

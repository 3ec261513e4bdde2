"""A calibrated graph with some of its layers in float, without preparing it anew."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from qtrace.data.batches import as_arguments, evaluating, translate_errors
from qtrace.errors import CalibrationError
from qtrace.graph.types import TracedModule
from qtrace.preparation.model import QuantizedModel
from qtrace.preparation.phases import in_phase
from qtrace.sensitivity.detection import DetectionLoss, Parts
from qtrace.sensitivity.layers import Layer, active_groups, find_layers
from qtrace.sensitivity.metrics import Metric, Outputs, sqnr
from qtrace.sensitivity.restored import FloatValues
from qtrace.verification.runs import leaves

__all__ = ["Answer", "Simulation", "outputs_of"]


_SAME = 80.0  # dB; folding, and sums in another order, differ by less


@dataclass(frozen=True)
class Answer:
    """What a question came to.

    Attributes:
        value: the metric.
        parts: of a `DetectionLoss`, by level; empty for any other metric.
    """

    value: float
    parts: Parts = ()


class Simulation:
    """Runs a prepared graph with any set of layers in float, and says how good it is.

    The batches run once in float; after that, once for each question. What is float or not is set by phases,
    so a question costs one pass over the data and nothing else.

    Args:
        prepared: a calibrated prepared module, or its view; the module is left as it is.
        batches: as for ``qtrace.calibrate``; a list, since they are run again and again.
        metric: compares outputs; None for `sqnr`.
        own: the user's metric, which runs the graph itself; it goes before ``metric``.
        twin: the float network with the graph's nodes (`qtrace.inspection.twin`), which errors are measured
            against, and which raised layers have their weights from; None for the graph itself in float.
        network: the network as traced, whose outputs are the reference where they are not the twin's: where
            ``equalize`` has made a ReLU of a ReLU6, say.
        weights, activations: whether raising a layer puts its weight, and what it reads and gives, in float.

    Raises:
        CalibrationError: when the module is not calibrated, or there are no batches.
        ConfigError: for a `DetectionLoss` with outputs that the graph does not have.
    """

    def __init__(
        self,
        prepared: TracedModule | QuantizedModel,
        batches: Iterable[Any],
        metric: Metric | None = None,
        own: Callable[[TracedModule], float] | None = None,
        twin: TracedModule | None = None,
        network: TracedModule | None = None,
        *,
        weights: bool = True,
        activations: bool = True,
    ) -> None:
        self._model = QuantizedModel.of(prepared, "prepared")
        self.prepared, self.own = self._model.module, own
        self.weights, self.activations, self.network = weights, activations, network
        self.metric = metric.of(self._model) if isinstance(metric, DetectionLoss) else metric or sqnr
        annotation = self._model.annotation
        for fq in self._model.fake_quants.values():
            fq.qparams()  # asks whether it is calibrated
        weights_by_group = {s.group: s.node for s in self._model.sites if s.sort == "weight"}
        sizes = {g: math.prod(int(n) for n in node.shape or ()) for g, node in weights_by_group.items()}
        self.layers: tuple[Layer, ...] = find_layers(annotation, sizes)
        self.batches = list(batches)
        if not self.batches:
            raise CalibrationError("there are no batches to measure on: give at least one.")
        self._folds = {f"{fold.layer}_bn": fold.layer for fold in annotation.folds}
        twin = self.prepared if twin is None else twin
        self._values = FloatValues(self.prepared, twin, annotation, self.layers)
        with in_phase(twin, "float"):
            self.reference = outputs_of(twin, self.batches)
        if network is not None:
            given = outputs_of(network, self.batches)
            if sqnr(given, self.reference) < _SAME:
                self.reference = given

    def value(self, raised: Collection[str] = ()) -> float:
        """The metric with some layers in float.

        Args:
            raised: names of layers.
        """
        return self.answer(raised).value

    def answer(self, raised: Collection[str] = ()) -> Answer:
        """The same with the parts of the metric, where it has some."""
        return self._ask(self._active(raised), raised if self.weights else ())

    def in_float(self) -> float:
        """The metric with all layers in float; the user's own, of the network, where there is one."""
        if self.own is not None and self.network is not None:
            with evaluating(self.network):
                return self.own(self.network)
        return self._ask(frozenset(), [layer.name for layer in self.layers]).value

    def only(self, layer: Layer) -> Answer:
        """The metric with all layers but one in float."""
        return self._ask(active_groups([layer], ()), self._others(layer))

    def only_group(self, group: str) -> float:
        """The metric with all sites but those of one group in float."""
        return self._ask(frozenset({group}), [layer.name for layer in self.layers]).value

    def noise(self, layer: Layer | None = None) -> float:
        """Output noise relative to the signal, as a power: what `sqnr` is the logarithm of.

        Args:
            layer: the one that makes it, by that of its roundings which raising takes away, with all else in
                float; None for all layers.
        """
        if layer is None:
            found = self._outputs(self._active(()), ())
        else:
            parts = active_groups([layer], ()) - active_groups([layer], [layer.name], **self._sides())
            found = self._outputs(parts, self._others(layer))
        return float(10 ** (-sqnr(self.reference, found) / 10))

    def _others(self, layer: Layer) -> list[str]:
        return [other.name for other in self.layers if other.name != layer.name]

    def _sides(self) -> dict[str, bool]:
        return {"weights": self.weights, "activations": self.activations}

    def _active(self, raised: Collection[str]) -> frozenset[str]:
        return active_groups(self.layers, raised, **self._sides())

    def _ask(self, active: Collection[str], raised: Collection[str]) -> Answer:
        if self.own is not None:
            with in_phase(self.prepared, "float"), evaluating(self.prepared), self._values.of(raised):
                self._activate(active, raised)
                return Answer(self.own(self.prepared))
        found = self._outputs(active, raised)
        if not isinstance(self.metric, DetectionLoss):
            return Answer(self.metric(self.reference, found))
        parts = self.metric.parts(self.reference, found)
        return Answer(self.metric.total(parts), parts)

    def _outputs(self, active: Collection[str], raised: Collection[str]) -> Outputs:
        with in_phase(self.prepared, "float"), self._values.of(raised):
            self._activate(active, raised)
            return outputs_of(self.prepared, self.batches)

    def _activate(self, active: Collection[str], raised: Collection[str]) -> None:
        for name in (*active, *(name for name, layer in self._folds.items() if layer not in raised)):
            self._model.rounding(name).phase = "quantize"


def outputs_of(model: TracedModule, batches: Iterable[Any]) -> list[list[np.ndarray]]:
    """What a graph gives for each batch, as it is, in eval mode."""
    found = []
    with evaluating(model):
        for index, batch in enumerate(batches):
            args, kwargs = as_arguments(batch, model, index)
            with translate_errors(model, (args, kwargs), index):
                found.append([t.numpy() for t in leaves(model(*args, **kwargs))])
    return found

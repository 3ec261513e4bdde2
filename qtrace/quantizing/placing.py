"""A search for a labelling, and the graph with the labelling that is taken."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from qtrace.config import QConfig, backends
from qtrace.costs import CostTable
from qtrace.graph.types import TracedModule
from qtrace.preparation.prepare import FloatSource, SearchOutcome, prepare_placed
from qtrace.preparation.record import read_record, write_record
from qtrace.quantizing.card import TIMED
from qtrace.quantizing.delivering import Timer
from qtrace.quantizing.labellings import (
    EVERYTHING,
    describe_labellings,
)
from qtrace.quantizing.reporting import Reporter
from qtrace.quantizing.suffixes import suffix_of
from qtrace.quantizing.times import Times
from qtrace.runtimes.host import RuntimeHost

__all__ = ["Placer", "Searched", "TimingPlan", "integers_of", "runtime_of"]


@dataclass(frozen=True)
class TimingPlan:
    """How labellings are measured.

    Attributes:
        times: takes what is measured, or holds times that are taken instead.
        timer: measures files in turns; None for `compare_files`.
        in_float: whether float may be chosen: for a file, and not for a graph to train on.
        host: the interpreter or machine that has the runtime; None for this one.
        keep: whether a file with integers is asked for, however slow it is.
    """

    times: Times
    timer: Timer | None = None
    in_float: bool = True
    host: RuntimeHost | None = None
    keep: bool = False

    @property
    def may_be_float(self) -> bool:
        """Whether float may be chosen."""
        return self.in_float and not self.keep


@dataclass(frozen=True)
class Searched:
    """A search for a labelling under a config.

    Attributes:
        config: the config.
        fitted: the cost table.
        prepared: the graph with the labelling that was found.
        outcome: the labellings in question; None without a choice.
    """

    config: QConfig
    fitted: CostTable | None
    prepared: TracedModule
    outcome: SearchOutcome | None


@dataclass(frozen=True)
class Placer:
    """Searches for labellings, and prepares the one that is taken.

    Attributes:
        traced: the float network.
        samples: the batches to calibrate on.
        source: the float graph, which all searches share.
        measurement: how to measure.
        reporter: takes the notes.
        everything: the config that rounds everything, if that is in question.
    """

    traced: TracedModule
    samples: Iterable[Any]
    source: FloatSource
    measurement: TimingPlan
    reporter: Reporter
    everything: QConfig | None = None

    def search(self, config: QConfig, quiet: bool = False) -> Searched:
        """Searches under a config, with the times of kernels for weights of its bits.

        Args:
            config: the config.
            quiet: whether nothing is said of the result, as the config is not the one that was asked for.
        """
        fit = self.measurement.times.fit
        fitted = None if fit is None else fit.table(config.weight_bits)
        prepared, outcome = prepare_placed(
            self.traced,
            config,
            self.samples,
            config,
            fitted=fitted,
            progress=self.reporter.progress,
            source=self.source,
            quiet=quiet,
        )
        return Searched(config, fitted, prepared, outcome)

    def round_everything(self) -> TracedModule:
        """Returns the graph of the config that rounds everything."""
        assert self.everything is not None
        config = self.everything
        return prepare_placed(self.traced, config, self.samples, config, source=self.source)[0]

    def take(
        self, times: Times, chosen: int, searches: Mapping[int, Searched], first: Searched
    ) -> TracedModule:
        """Returns the graph with the labelling of the times that is chosen.

        Args:
            times: the measured times.
            chosen: the number of a measured labelling; 0 if none was measured.
            searches: bits of weights -> the search with them.
            first: the search under the given config.
        """
        text = "the ops are those of the given times"
        # A file that may be in float and a graph to train on take other labellings of the same times.
        integers, bits, centred = times.integers or (), times.weight_bits, False
        if times.labellings:
            text = describe_labellings(times.labellings, chosen, times.left_out)
            self.reporter.note(f"placement: {text}")
            taken = times.labellings[chosen]
            if taken.name == EVERYTHING and self.everything is not None:
                return self.round_everything()
            integers, bits, centred = taken.integers, taken.weight_bits, taken.centred
        search = searches.get(bits, first)
        prepared, outcome = search.prepared, search.outcome
        assert outcome is not None
        labels = {name: name in integers or fixed for name, fixed in outcome.float_labels.items()}
        if centred or labels != dict(outcome.point.labels):
            prepared, _ = prepare_placed(
                self.traced,
                search.config,
                self.samples,
                search.config,
                replace(outcome.instead(labels, text), centred=centred),
                search.fitted,
                source=self.source,
            )
        if search is not first and any(labels.values()):
            self.reporter.note(
                f"weights have {bits} bits: onnxruntime's fast products of uint8 and int8 are exact with "
                "them on this processor, and saturate with 8; `weight: {bits: 8}` in the recipe keeps 8"
            )
        if times.labellings:
            _write_measured(prepared, text)
        return prepared


def _write_measured(prepared: TracedModule, text: str) -> None:
    """Writes into the record of a prepared graph how its placement was chosen."""
    record = read_record(prepared)
    note = record.annotation.placement
    if note is not None:
        annotation = replace(record.annotation, placement=replace(note, measured=text))
        write_record(prepared, replace(record, annotation=annotation))


def integers_of(outcome: SearchOutcome) -> tuple[str, ...]:
    """Returns the ops that a labelling puts on integers."""
    return tuple(name for name, on_integers in outcome.point.labels.items() if on_integers)


def runtime_of(backend: str) -> str:
    """Returns the name of the runtime that files of a backend are for."""
    return backends.get(backend).runtime or TIMED[suffix_of(backend)][0]

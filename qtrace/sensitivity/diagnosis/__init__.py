"""From a bad number to its cure: a verdict on a quantized graph, the causes of its noise, and a recipe.

A run of the float graph measures each channel of each site: its range, its power and its own rounding error.
What follows a site cannot blame it for errors from before it, as its own error is measured on float values.
If the outputs are worse than good, the sites whose channels lose most are rounded one at a time, and
ranked by the noise at the outputs. An error that the network hides, or one that is inherited, ranks low.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from qtrace.comparing.sums import Outputs
from qtrace.data.batches import as_arguments, count_samples
from qtrace.display import Displayed
from qtrace.errors import SHOWN_NAMES
from qtrace.graph.types import TracedModule
from qtrace.plugins.options import check_arguments
from qtrace.preparation.faithfulness import halve_samples
from qtrace.preparation.model import QuantizedModel
from qtrace.process import on_engine_thread
from qtrace.sensitivity.diagnosis.causes import (
    Cause,
    Cure,
    cure_recipe,
    find_cause,
    find_cure,
    observes_too_little,
)
from qtrace.sensitivity.diagnosis.inputs import (
    OTHER_DATA,
    InputStatistics,
    compare_inputs,
    find_repeated,
    find_single_numbers,
    measure_inputs,
)
from qtrace.sensitivity.diagnosis.judged_outputs import JudgedOutputs, judge_outputs
from qtrace.sensitivity.diagnosis.measuring import SiteEvidence, measure_output_noise, measure_sites
from qtrace.sensitivity.diagnosis.verdict import MANY_SAMPLES, Doubt, GroupVerdict, Verdict
from qtrace.sensitivity.metrics import choose
from qtrace.sensitivity.simulation import Simulation

__all__ = [
    "Calibrated",
    "Cause",
    "Cure",
    "Diagnosis",
    "Doubt",
    "GroupVerdict",
    "InputStatistics",
    "JudgedOutputs",
    "SiteEvidence",
    "Verdict",
    "diagnose",
    "find_repeated",
    "find_single_numbers",
    "judge_outputs",
    "measure_inputs",
]

_SUSPECTS = 8
_LEAST_SHARE = 0.05


_OTHER_DATA_DOUBT = Doubt(
    "other-data",
    "The data of calibration and verdict are prepared otherwise: give both as the network takes them.",
)


@dataclass(frozen=True)
class Calibrated:
    """What is known about the calibration.

    Attributes:
        samples: the number of samples; None if unknown.
        inputs: the distribution of their inputs.
        read: the share of the samples to judge on that the calibration has read.
    """

    samples: int | None = None
    inputs: tuple[InputStatistics, ...] = ()
    read: float = 0.0


@dataclass(frozen=True, repr=False)
class Diagnosis(Displayed):
    """A verdict with its causes.

    Attributes:
        verdict: the verdict.
        causes: the causes, causes of the data first, then by their noise at the outputs.
        cures: the cure of each cause; None where there is none.
        sites: the evidence of every site, for figures.
    """

    verdict: Verdict
    causes: tuple[Cause, ...]
    cures: tuple[Cure | None, ...]
    sites: tuple[SiteEvidence, ...]

    def _text(self, max_width: int | None) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """Returns the verdict, its doubts and, if the graph is to blame, the worst sites with causes."""
        lines = self.verdict.lines()
        blameless = self.verdict.word == "good" or self.verdict.doubted
        for cause in () if blameless else self.causes:
            share = "" if cause.share is None else f" ({cause.share:.0%} of the noise)"
            place = f" at {cause.site}" if cause.site else ""
            lines.append(f"  {cause.name}{place}{share}: {cause.text}")
        return lines

    @property
    def bad_data(self) -> bool:
        """Whether the first cause lies in the calibration data."""
        return bool(self.cures) and self.cures[0] is not None and self.cures[0].data

    def recipe(self, importing: str | None = None) -> str:
        """Returns the recipe that cures the causes; "" if none does, or nothing but samples is missing.

        Args:
            importing: the recipe to change, as the new file names it; None for the lines to add to it.
        """
        good = self.verdict.word == "good" or self.verdict.doubted
        return "" if good else cure_recipe(self.causes, self.cures, importing)

    def to_dict(self) -> dict[str, Any]:
        """Returns the diagnosis as plain data."""
        return asdict(self)


@check_arguments
@on_engine_thread
def diagnose(
    model: TracedModule,
    batches: Sequence[Any],
    *,
    twin: TracedModule | None = None,
    calibrated: Calibrated | None = None,
    metric: Callable[[TracedModule], float] | None = None,
    measured_on: str = "samples",
    at_least: float | None = None,
    run_file: Callable[[Sequence[Any]], Outputs] | None = None,
    progress: bool = True,
) -> Diagnosis:
    """Judges a quantized graph and finds the causes of its noise.

    Args:
        model: a calibrated module, prepared or converted; it is not changed.
        batches: a few small batches that were not used to calibrate.
        twin: the float network with the graph's nodes; None for the graph itself in float.
        calibrated: what is known about the calibration.
        metric: the user's metric, which gets a graph and returns a number; more is better.
        measured_on: what the batches are, in words.
        at_least: the limit for the metric, or for the SQNR in dB.
        run_file: returns the outputs of the file that was exported, for batches, which are judged in the
            place of the graph's; None to run the graph. After a selection the graph runs, whose rows tell.
        progress: whether to show a progress bar on stderr while suspects are measured.

    Raises:
        CalibrationError: when the module is not calibrated, or there are no batches.
    """
    view = QuantizedModel(model)
    simulation = Simulation(view, batches, twin=twin)
    known = calibrated or Calibrated()
    values = _metric_values(view, simulation.batches, twin, metric)
    verdict = _judge(view, simulation, values, measured_on, at_least, known, run_file)
    half = halve_samples(simulation.batches, model)
    evidence = measure_sites(view, twin or model, half)
    if verdict.word != "good" and not verdict.doubted:
        compared = Simulation(view, half, twin=twin)
        evidence = measure_output_noise(compared, evidence, _suspects(evidence), progress=progress)
    causes = _rank(evidence, known, simulation.batches)
    if any(cause.name in OTHER_DATA for cause in causes):
        verdict = verdict.with_doubts((_OTHER_DATA_DOUBT,))
    cures = tuple(find_cure(cause, view.config, view.annotation) for cause in causes)
    return Diagnosis(verdict, causes, cures, tuple(evidence))


def _metric_values(
    view: QuantizedModel,
    batches: Sequence[Any],
    twin: TracedModule | None,
    metric: Callable[[TracedModule], float] | None,
) -> tuple[float, float] | None:
    """Returns the user's metric of the quantized graph and of the float graph; None without a metric."""
    if metric is None:
        return None
    simulation = Simulation(view, batches[:1], own=choose("sqnr", metric)[2], twin=twin)
    return simulation.value(), simulation.in_float()


def _judge(
    view: QuantizedModel,
    simulation: Simulation,
    values: tuple[float, float] | None,
    measured_on: str,
    at_least: float | None,
    known: Calibrated,
    run_file: Callable[[Sequence[Any]], Outputs] | None,
) -> Verdict:
    if run_file is None or simulation.selected:
        reference, outputs, selected = simulation.quantized()
    else:
        reference, outputs, selected = simulation.reference, run_file(simulation.batches), simulation.selected
    counts = [count_samples(as_arguments(b, view.module, i)) for i, b in enumerate(simulation.batches)]
    compared = JudgedOutputs(
        simulation.groups,
        reference,
        outputs,
        counts,
        find_repeated(simulation.batches),
        bool(find_single_numbers(simulation.batches)),
        selected.worst(),
        known.read,
        bool(view.rounded),
    )
    return judge_outputs(compared, measured_on, values, at_least)


def _suspects(evidence: Sequence[SiteEvidence]) -> list[str]:
    """Returns the groups whose channels lose most, activations and weights by turns."""
    groups: list[str] = []
    for sort in ("activation", "weight"):
        sites = sorted((e for e in evidence if e.sort == sort), key=lambda e: -e.channels.mean_relative_noise)
        groups += list(dict.fromkeys(e.group for e in sites))[: _SUSPECTS // 2]
    return groups


def _rank(evidence: Sequence[SiteEvidence], known: Calibrated, batches: Sequence[Any]) -> tuple[Cause, ...]:
    """Returns the worst sites with their causes, a cause in the data first."""
    data = compare_inputs(known.inputs, measure_inputs(batches))
    causes = [] if data is None else [data]
    measured = [e for e in evidence if e.output_noise is not None]
    total = sum(_finite(e.output_noise) for e in measured)
    if total <= 0:
        measured = sorted(evidence, key=lambda e: -e.channels.mean_relative_noise)
    noise = _by_root(measured)
    groups: set[str] = set()
    for site in sorted(measured, key=lambda e: -noise.get(e.site, 0.0)):
        share = noise.get(site.site, 0.0) / total if total > 0 else None
        if site.group in groups or site.site not in noise or (share is not None and share < _LEAST_SHARE):
            continue
        cause = find_cause(site) or Cause("rounding", site.site, site.op, _describe_rounding(site))
        groups.add(site.group)
        causes.append(replace(cause, share=share))
    few = None if data is not None else _few_samples(evidence, known, causes)
    return tuple(([few] if few else []) + causes)[:SHOWN_NAMES]


def _by_root(measured: Sequence[SiteEvidence]) -> dict[str, float]:
    """Maps the site of each root to its noise at the outputs.

    Weights that read channels of unlike ranges have unlike sizes themselves: their noise counts for the
    activation that they read, if that shows the cause.
    """
    noise = {site.site: _finite(site.output_noise) for site in measured}
    roots = {reader: e.site for e in measured if _is_unlike(e) for reader, _ in e.readers}
    for site in measured:
        cause = find_cause(site) if site.sort == "weight" and site.op in roots else None
        if cause is not None and cause.name == "unlike-input-weights":
            noise[roots[site.op]] += noise.pop(site.site)
    return noise


def _is_unlike(site: SiteEvidence) -> bool:
    cause = find_cause(site) if site.sort == "activation" else None
    return cause is not None and cause.name in ("outlier-channels", "unlike-channels", "unlike-branches")


def _finite(noise: float | None) -> float:
    return 0.0 if noise is None or math.isnan(noise) else min(noise, 1e30)


def _describe_rounding(site: SiteEvidence) -> str:
    lost = site.channels.mean_relative_noise
    level = f"{-10 * math.log10(lost):.0f} dB in the mean channel" if lost > 0 else "no error of its own"
    return f"{site.scheme} in the range {site.lo:.3g} to {site.hi:.3g}, {level}"


def _few_samples(
    evidence: Sequence[SiteEvidence], known: Calibrated, causes: Sequence[Cause]
) -> Cause | None:
    """Returns the cause if the values of many sites leave the range that few samples showed."""
    activations = [e for e in evidence if e.sort == "activation" and e.observed is not None]
    beyond = [e for e in activations if observes_too_little(e)]
    named = bool(causes) and causes[0].name == "unseen-values"
    if not beyond or not (named or len(beyond) * 3 >= len(activations)):
        return None
    if known.samples is not None and known.samples > MANY_SAMPLES:
        return None
    count = "few" if known.samples is None else str(known.samples)
    worst = max(beyond, key=lambda e: e.beyond_observed)
    return Cause(
        "too-few-samples",
        "",
        "",
        f"at {len(beyond)} of {len(activations)} sites, values leave the range that {count} calibration "
        f"samples showed, at {worst.site} by {worst.beyond_observed:.0%} of it",
    )

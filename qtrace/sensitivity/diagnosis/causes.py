"""The causes of a low SQNR, and their cures: changes of the recipe.

One function for each cause looks at the evidence of one site.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from qtrace.config import QConfig, backends
from qtrace.config.tree import dump
from qtrace.errors import shorten_list
from qtrace.preparation.annotation import Annotation, ExprNote
from qtrace.ptq.layers.quantized import LAYERS
from qtrace.ptq.layers.scaling import THROUGH
from qtrace.sensitivity.diagnosis.measuring import Branch, SiteEvidence
from qtrace.sensitivity.diagnosis.verdict import GOOD_NOISE

_UNLIKE = 8.0  # the ratio of ranges from which one scale for both loses three bits
_CLIPPED = 0.5  # the share of the noise from which clipping is the cause
_FEW_BITS = 8
_AMPLIFIERS = ("div", "sqrt", "exp", "pow", "log", "softmax", "batch_norm", "layer_norm")


@dataclass(frozen=True)
class Cause:
    """Why a site loses precision.

    Attributes:
        name: the kind of cause, a word that `qtrace calibrate --json` and the docs share.
        site: the name of the site; "" for a cause that lies in the data.
        op: the op that computes the site, or reads the weight.
        text: the evidence, as a clause with numbers.
        share: the share of the noise of all measured sites; None if it was not measured.
        channels: the channels at fault.
        details: further figures, as plain data.
    """

    name: str
    site: str
    op: str
    text: str
    share: float | None = None
    channels: tuple[int, ...] = ()
    details: tuple[tuple[str, Any], ...] = ()


def find_cause(evidence: SiteEvidence) -> Cause | None:
    """Returns the first cause that the evidence of a site shows; None where only rounding is at work."""
    for judge in _ACTIVATION_CAUSES if evidence.sort == "activation" else _WEIGHT_CAUSES:
        cause = judge(evidence)
        if cause is not None:
            return cause
    return None


def observes_too_little(evidence: SiteEvidence) -> bool:
    """Whether most of the site's noise is by values that leave the range that calibration observed."""
    return (
        evidence.sort == "activation"
        and evidence.unseen_share > _CLIPPED
        and evidence.channels.mean_relative_noise > GOOD_NOISE / 10
    )


def _cause(
    evidence: SiteEvidence, name: str, text: str, channels: tuple[int, ...] = (), **details: Any
) -> Cause:
    return Cause(name, evidence.site, evidence.op, text, None, channels, tuple(details.items()))


def _clipping(evidence: SiteEvidence) -> Cause | None:
    if evidence.clipped_share < _CLIPPED or evidence.channels.mean_relative_noise < GOOD_NOISE:
        return None
    low, high = min(evidence.channels.low), max(evidence.channels.high)
    text = f"the range {evidence.lo:.3g} to {evidence.hi:.3g} clips values from {low:.3g} to {high:.3g}"
    if observes_too_little(evidence) and evidence.observed is not None:
        a, b = evidence.observed
        return _cause(evidence, "unseen-values", f"{text}; calibration saw only {a:.3g} to {b:.3g}")
    observer = f", which observer {evidence.observer} chose" if evidence.observer else ""
    return _cause(evidence, "clipped-range", f"{text}{observer}")


def _wide_range(evidence: SiteEvidence) -> Cause | None:
    low, high = min(evidence.channels.low), max(evidence.channels.high)
    width, used = evidence.hi - evidence.lo, max(high, 0.0) - min(low, 0.0)
    if used <= 0 or width < _UNLIKE * used or evidence.channels.mean_relative_noise < GOOD_NOISE / 10:
        return None
    return _cause(
        evidence,
        "wide-range",
        f"the range {evidence.lo:.3g} to {evidence.hi:.3g} is {width / used:.0f} times as wide as the values "
        f"here, {low:.3g} to {high:.3g}: calibration saw other data, or outliers",
    )


def _unlike_branches(evidence: SiteEvidence) -> Cause | None:
    branches = [branch for branch in evidence.branches if branch.magnitude > 0]
    if len(branches) < 2:
        return None
    largest: Branch = max(branches, key=lambda branch: branch.magnitude)
    worst = max(branches, key=lambda branch: branch.relative_noise)
    ratio = largest.magnitude / worst.magnitude
    if ratio < _UNLIKE or worst.relative_noise < GOOD_NOISE:
        return None
    return _cause(
        evidence,
        "unlike-branches",
        f"one scale for branches of unlike ranges: {largest.name} reaches {largest.magnitude:.3g}, "
        f"{worst.name} only {worst.magnitude:.3g} (1/{ratio:.0f})",
        branches=tuple(branch.name for branch in branches),
    )


def _outlier_channels(evidence: SiteEvidence) -> Cause | None:
    if evidence.per_channel:
        return None
    magnitudes, alive = evidence.channels.magnitudes, evidence.channels.alive
    if alive.sum() < 2:
        return None
    middle = float(np.median(magnitudes[alive]))
    outliers = np.flatnonzero(alive & (magnitudes > _UNLIKE * middle))
    noise = evidence.channels.relative_noise
    lost = alive & (noise > GOOD_NOISE)
    if not lost.any() or lost.sum() * 4 < alive.sum():
        return None
    if not len(outliers):
        ratio = float(magnitudes[alive].max() / max(float(magnitudes[lost].min()), 1e-30))
        if ratio < 2 * _UNLIKE:
            return None
        return _cause(
            evidence,
            "unlike-channels",
            f"one scale for channels of unlike ranges, from {magnitudes[lost].min():.3g} to "
            f"{magnitudes[alive].max():.3g}; {lost.sum()} of {alive.sum()} channels lose more than 1 % of "
            f"their power{_amplified(evidence)}",
        )
    order = sorted(outliers, key=lambda c: -magnitudes[c])
    names = shorten_list(order)
    plural = "s" if len(order) > 1 else ""
    return _cause(
        evidence,
        "outlier-channels",
        f"channel{plural} {names} of {len(magnitudes)} reach{'' if plural else 'es'} "
        f"{magnitudes[order[0]]:.3g}, {magnitudes[order[0]] / middle:.0f} times the median channel; one "
        f"scale leaves the others {_levels(middle, evidence)}{_amplified(evidence)}",
        tuple(int(c) for c in order),
    )


def _levels(magnitude: float, evidence: SiteEvidence) -> str:
    """Returns how many integers a channel of some magnitude uses, in words."""
    width = evidence.hi - evidence.lo
    count = int(magnitude / width * 2**evidence.bits) + 1 if width > 0 else 1
    return f"{count} level{'s' if count > 1 else ''}"


def _amplified(evidence: SiteEvidence) -> str:
    readers = [name for name, kind in evidence.readers if kind in _AMPLIFIERS]
    return f"; {readers[0]} amplifies the error" if readers else ""


def _amplifying_reader(evidence: SiteEvidence) -> Cause | None:
    readers = [(name, kind) for name, kind in evidence.readers if kind in _AMPLIFIERS]
    noise = evidence.output_noise
    own = evidence.channels.mean_relative_noise
    if not readers or noise is None or noise < 10 * own or noise < GOOD_NOISE / 10:
        return None
    name, kind = readers[0]
    text = f"{kind} ({name}) amplifies its rounding error {noise / max(own, 1e-12):.0f} times in power"
    return _cause(evidence, "amplifying-op", text, reader=name)


def _dead_inputs(evidence: SiteEvidence) -> Cause | None:
    if not evidence.dead_inputs or evidence.dead_magnitude < _UNLIKE * evidence.live_magnitude:
        return None
    if evidence.channels.mean_relative_noise < GOOD_NOISE / 10:
        return None
    ratio = evidence.dead_magnitude / max(evidence.live_magnitude, 1e-30)
    return _cause(
        evidence,
        "dead-channels",
        f"{evidence.dead_inputs} input channels are always 0, and the weights that read them, "
        f"{ratio:.0f} times as large as the others, set the scale",
    )


def _unlike_inputs(evidence: SiteEvidence) -> Cause | None:
    inputs = evidence.inputs
    if inputs is None or inputs.mean_relative_noise < GOOD_NOISE:
        return None
    used = inputs.magnitudes[inputs.alive & (inputs.magnitudes > 0)]
    if len(used) < 2 or used.max() < 2 * _UNLIKE * used.min():
        return None
    return _cause(
        evidence,
        "unlike-input-weights",
        f"one scale for weights of unlike input channels, from {used.min():.3g} to {used.max():.3g} "
        f"(1 to {used.max() / used.min():.0f})",
    )


def _unlike_weights(evidence: SiteEvidence) -> Cause | None:
    if evidence.per_channel:
        return None
    magnitudes, alive = evidence.channels.magnitudes, evidence.channels.alive
    if alive.sum() < 2 or evidence.channels.mean_relative_noise < GOOD_NOISE / 10:
        return None
    low, high = float(magnitudes[alive].min()), float(magnitudes[alive].max())
    if high < _UNLIKE * low:
        return None
    return _cause(
        evidence,
        "unlike-weights",
        f"one scale for weights of unlike output channels, from {low:.3g} to {high:.3g} "
        f"(1 to {high / max(low, 1e-30):.0f})",
    )


def _clipped_weights(evidence: SiteEvidence) -> Cause | None:
    if evidence.observed is None or evidence.per_channel:
        return None
    low, high = evidence.observed
    width = max(evidence.hi, -evidence.lo)
    if max(high, -low) < 1.5 * width or evidence.channels.mean_relative_noise < GOOD_NOISE:
        return None
    text = f"the range {evidence.lo:.3g} to {evidence.hi:.3g} clips weights from {low:.3g} to {high:.3g}"
    return _cause(evidence, "clipped-range", f"{text}, which observer {evidence.observer} chose")


def _few_bits(evidence: SiteEvidence) -> Cause | None:
    if evidence.bits >= _FEW_BITS or evidence.channels.mean_relative_noise < GOOD_NOISE / 10:
        return None
    return _cause(evidence, "few-bits", f"{evidence.bits} bits leave {2**evidence.bits} levels")


_Judge = Callable[[SiteEvidence], Cause | None]
_ACTIVATION_CAUSES: tuple[_Judge, ...] = (
    _clipping,
    _unlike_branches,  # before the next: a site may have the wide range of those that it shares one with
    _wide_range,
    _outlier_channels,
    _amplifying_reader,
    _few_bits,
)
_WEIGHT_CAUSES: tuple[_Judge, ...] = (
    _dead_inputs,
    _clipped_weights,
    _unlike_weights,
    _unlike_inputs,
    _few_bits,
)


_KEEP_OUTLIERS = ("minmax", "moving_average")
_JOINS = ("concat", "stack", "setitem", "where", "scatter")
_SPREADS = (*THROUGH, "add", "sub", "flatten", "reshape", "pad", "mean")


@dataclass(frozen=True)
class Cure:
    """A change that removes a cause.

    Attributes:
        text: the change in words.
        ptq: the algorithms of the new recipe, as plain data; None to keep them.
        settings: other keys of the recipe, as plain data.
        rules: rules to add, as plain data.
        data: whether other calibration data is needed instead of another recipe.
    """

    text: str
    ptq: tuple[Any, ...] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    rules: tuple[dict[str, Any], ...] = ()
    data: bool = False


def find_cure(cause: Cause, config: QConfig, annotation: Annotation) -> Cure | None:
    """Returns the cure of a cause; None where only a search by `qtrace sensitivity` may help.

    Args:
        cause: the cause.
        config: the config that the graph was prepared with.
        annotation: the decisions for the graph.
    """
    build = CURES.get(cause.name)
    return None if build is None else build(cause, config, annotation)


def _use_data(cause: Cause, config: QConfig, annotation: Annotation) -> Cure:
    text = {
        "too-few-samples": "calibrate on more samples",
        "channel-order": "calibrate on data whose channels are in the order that evaluation uses",
        "normalization": "calibrate on data that is normalized as evaluation does it",
    }
    return Cure(text[cause.name], data=True)


def _widen(cause: Cause, config: QConfig, annotation: Annotation) -> Cure | None:
    """Chooses ranges by the squared error, or the whole range where that clips already."""
    site = next((s for s in annotation.sites if s.name == cause.site), None)
    if site is None or site.plan is None:
        return None
    observer = "minmax" if site.plan.observer == "mse" else "mse"
    sort = site.sort
    general = config.observers.weight if sort == "weight" else config.observers.activation
    if general is None or site.plan.observer == general.name:
        return Cure(f"observer {observer} for {sort}s", settings={"observers": {sort: observer}})
    rule = {"match": {"name": cause.op}, "observers": {sort: observer}}
    return Cure(f"observer {observer} at {cause.op}", rules=(rule,))


def _narrow(cause: Cause, config: QConfig, annotation: Annotation) -> Cure | None:
    """Cuts outliers off a range, where the observer keeps them; else the data must be other data."""
    site = next((s for s in annotation.sites if s.name == cause.site), None)
    if site is not None and site.plan is not None and site.plan.observer in _KEEP_OUTLIERS:
        return _widen(cause, config, annotation)
    return Cure("calibrate on data like that of the verdict", data=True)


def _equalize(cause: Cause, config: QConfig, annotation: Annotation) -> Cure | None:
    listed = [spec for _, spec in config.ptq_entries]
    if any(spec.name == "equalize" for spec in listed) or not _is_scalable(cause.site, annotation):
        return _leave_in_float(cause, config, annotation)
    entries: list[Any] = [] if any(spec.name == "fuse_bn" for spec in listed) else ["fuse_bn"]
    for spec in listed:
        entries.append({spec.name: dict(spec.options)} if spec.options else spec.name)
    entries.insert(entries.index("fuse_bn") + 1, "equalize")
    return Cure("equalize the channels (ptq)", ptq=tuple(entries))


def _weights_per_channel(cause: Cause, config: QConfig, annotation: Annotation) -> Cure | None:
    limits = backends.get(annotation.backend).limits.get("weight")
    if limits is None or not limits.per_channel:
        return _equalize(cause, config, annotation)
    text, settings = "a scale for each channel of weights", {"weight": {"axis": 0}}
    alike = _equalize(cause, config, annotation)  # the layer behind has the opposite sizes
    if alike is None or alike.ptq is None:
        return Cure(text, settings=settings)
    return Cure(f"{text}; {alike.text}", ptq=alike.ptq, settings=settings)


def _leave_in_float(cause: Cause, config: QConfig, annotation: Annotation) -> Cure | None:
    """Leaves in float the ops that read the site and the join that gives it, or the result of an op."""
    names = [
        n.name for n in annotation.notes if n.state == "int" and cause.site in (*n.reads, *n.inputs, n.weight)
    ]
    joins = [n.name for n in annotation.notes if n.name == cause.op and n.kind in _JOINS]
    names = list(dict.fromkeys((*joins, *names)))
    if not names:
        return _leave_result_in_float(cause, annotation)
    rule = {"match": {"name": names if len(names) > 1 else names[0]}, "quantize": False}
    return Cure(f"leave {', '.join(names)} in float", rules=(rule,))


def _leave_result_in_float(cause: Cause, annotation: Annotation) -> Cure | None:
    """Leaves the result of an op that nothing on integers reads in float; a weight has none."""
    note = next((n for n in annotation.notes if n.name == cause.op and n.state == "int"), None)
    if note is None or all(site.node != cause.op for site in annotation.sites if site.name == cause.site):
        return None
    if backends.get(annotation.backend).integer_layers and note.role == "compute":
        rule = {"match": {"name": note.name}, "quantize": False}
        return Cure(f"leave {note.name} in float", rules=(rule,))
    rule = {"match": {"name": note.name}, "quantize_output": False}
    return Cure(f"leave the result of {note.name} in float", rules=(rule,))


def _more_bits(cause: Cause, config: QConfig, annotation: Annotation) -> Cure | None:
    sort = next((s.sort for s in annotation.sites if s.name == cause.site), "weight")
    return Cure(f"8 bits for {sort}s", settings={sort: {"bits": 8}})


def _is_scalable(site: str, annotation: Annotation) -> bool:
    """Whether layers on both sides of a site may be scaled channel by channel; of a weight, its results."""
    notes = annotation.notes
    givers = {name: note for note in notes for name in note.gives}
    node = next((s.node for s in annotation.sites if s.name == site), site)
    readers_of_weight = [n for n in notes if n.weight == site]
    queue = [readers_of_weight[0].name] if readers_of_weight else [node]
    seen: set[str] = set()
    writers = readers = 0
    while queue:
        name = queue.pop()
        if name in seen:
            continue
        seen.add(name)
        giver = givers.get(name)
        if giver is None or not _passes(giver, queue):
            return False
        writers += giver.kind in LAYERS
        users = [note for note in notes if name in note.reads]
        if not users:
            return False  # it leaves the model
        for user in users:
            if user.kind in LAYERS:
                readers += 1
            elif user.kind in _SPREADS:
                queue.extend((*user.gives, *(n for n in user.reads if n in givers)))
            else:
                return False
    return writers > 0 and readers > 0


def _passes(giver: ExprNote, queue: list[str]) -> bool:
    """Whether channels may be scaled at the op that computes a tensor; adds its inputs to ``queue``."""
    if giver.kind in LAYERS:
        return True
    if giver.kind not in _SPREADS:
        return False
    queue.extend(giver.reads)
    return True


CURES = {
    "too-few-samples": _use_data,
    "channel-order": _use_data,
    "normalization": _use_data,
    "unseen-values": _widen,
    "clipped-range": _widen,
    "wide-range": _narrow,
    "unlike-branches": _leave_in_float,
    "outlier-channels": _equalize,
    "unlike-channels": _equalize,
    "unlike-weights": _weights_per_channel,
    "unlike-input-weights": _equalize,
    "dead-channels": _leave_in_float,
    "amplifying-op": _leave_in_float,
    "few-bits": _more_bits,
}


def cure_recipe(causes: Sequence[Cause], cures: Sequence[Cure | None], importing: str | None) -> str:
    """Returns the recipe that cures all causes, with a reason above each line; "" if no recipe does.

    Args:
        causes: the causes.
        cures: the cure of each cause.
        importing: the recipe to change, as a file beside the new one names it; None for only its lines.
    """
    pairs = [(cause, cure) for cause, cure in zip(causes, cures, strict=True) if cure is not None]
    if any(cure.data for _, cure in pairs):
        return ""
    lines: list[str] = []
    settings: dict[str, dict[str, Any]] = {}
    for cause, cure in pairs:
        new = {k: v for k, v in cure.settings.items() if {**settings.get(k, {}), **v} != settings.get(k)}
        if cure.ptq is not None and not any(line.startswith("ptq:") for line in lines):
            lines += [_comment(cause), f"ptq: {dump(list(cure.ptq), flow=True).strip()}"]
        if new:
            lines.append(_comment(cause))
        for key, value in new.items():
            settings.setdefault(key, {}).update(value)
            lines = [line for line in lines if not line.startswith(f"{key}:")]
            lines.append(f"{key}: {dump(settings[key], flow=True).strip()}")
    rules = [(cause, rule) for cause, cure in pairs for rule in cure.rules]
    if rules:
        lines.append("rules:")
    for cause, rule in rules:
        lines += [f"  {_comment(cause)}", f"  - {dump(rule, flow=True).strip()}"]
    if not lines or importing is None:
        return "\n".join(lines)
    head = ["schema: qtrace/1", f"imports: {dump([importing], flow=True).strip()}", ""]
    return "\n".join((*head, *lines)) + "\n"


def _comment(cause: Cause) -> str:
    return f"# {cause.site}: {cause.text}."

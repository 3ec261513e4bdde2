"""The cure of each cause, as a change of the recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from qtrace.config import QConfig, backends
from qtrace.config.tree import dump
from qtrace.preparation.annotation import Annotation, ExprNote
from qtrace.ptq.layers.quantized import LAYERS
from qtrace.ptq.layers.scaling import THROUGH
from qtrace.sensitivity.diagnosis.causes import Cause

__all__ = ["CURES", "Cure", "cure_recipe", "find_cure"]

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
        importing: the recipe to change, as a file beside the new one names it; None for its lines alone.
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

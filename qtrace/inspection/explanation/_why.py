"""The whole story of one node, site or module, in sentences, and what the config changed for it."""

from __future__ import annotations

import difflib
import fnmatch
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from qtrace.config import QConfig, Rule, SchemePatch, Spec, backends
from qtrace.config.tree import dump
from qtrace.display import Displayed
from qtrace.errors import GraphError, shorten_list
from qtrace.inspection.explanation import _table
from qtrace.inspection.explanation._summary import Proposals
from qtrace.inspection.explanation._table import Index
from qtrace.preparation.annotation import DYNAMIC, ExprNote, Site, site_name
from qtrace.preparation.float16 import Float16Choice
from qtrace.scheme import QParams, QScheme


class Changes:
    """Replays the rules of a config for an op, to say what each changed.

    Args:
        backend: the name of the backend.
        qconfig: the config.
        origins: file and line of each rule.
        comments: the comment above each rule; empty if unknown.
    """

    def __init__(
        self, backend: str, qconfig: QConfig, origins: tuple[str, ...], comments: tuple[str, ...]
    ) -> None:
        self.backend, self.qconfig = backends.get(backend), qconfig
        self.origins, self.comments = origins, comments

    def describe(self, note: ExprNote) -> Iterator[str]:
        """Yields a sentence for the backend, for what the config says of every op, and for each rule."""
        state = _State(self.backend.activation, self.backend.weight, self.qconfig)
        schemes = f"{state.schemes['activation'].describe()} activations"
        if note.weight:
            schemes += f" and {state.schemes['weight'].describe()} weights"
        yield f"Backend {self.backend.name} asks for {schemes}."
        for sort, patch in (("activation", self.qconfig.activation), ("weight", self.qconfig.weight)):
            if patch is not None and (sort == "activation" or note.weight):
                changed = state.patch(sort, patch)
                yield f"For every op, {self.qconfig.place(sort)} {_join(changed)}."
        for rank in note.ranks:
            rule = self.qconfig.rules[rank]
            match = dump(rule.match.to_dict(), flow=True).strip()
            changed = state.apply(rule, bool(note.weight))
            comment = f" ({self.comments[rank]})" if self.comments and self.comments[rank] else ""
            yield f"Rule {self.origins[rank]}, match {match}, {_join(changed)}.{comment}"
        if not note.ranks and self.qconfig.rules:
            yield "No rule of the config matches it."


class _State:
    """The settings of an op after some of the rules."""

    def __init__(self, activation: QScheme, weight: QScheme, qconfig: QConfig) -> None:
        self.schemes: dict[str, QScheme] = {"activation": activation, "weight": weight}
        self.settings: dict[str, object] = {
            "observer of activations": qconfig.activation_observer,
            "observer of weights": qconfig.weight_observer,
            "fake quant": qconfig.effective_fakequant,
        }

    def patch(self, sort: str, patch: SchemePatch) -> list[str]:
        """Changes one scheme; returns the change in words."""
        first = sort not in self.schemes  # a result lacks a scheme of its own at first
        old = self.schemes.get(sort) or self.schemes["activation"]
        new = self.schemes[sort] = patch.apply(old)
        if first:
            return [f"gives its result {new.describe()}, whatever its readers ask for"]
        return [] if old == new else [f"changes {_SORTS[sort]} from {old.describe()} to {new.describe()}"]

    def _set(self, setting: str, value: Spec | bool | None) -> list[str]:
        if value is None or self.settings.get(setting) == value:
            return []
        old, self.settings[setting] = self.settings.get(setting), value
        shown = [_spec(v) if isinstance(v, Spec) else str(v).lower() for v in (old, value)]
        if isinstance(value, Spec) and old is not None:
            return [f"changes the {setting} from {shown[0]} to {shown[1]}"]
        return [f"says {setting}: {shown[1]}"]

    def apply(self, rule: Rule, has_weight: bool) -> list[str]:
        """Applies ``rule``; returns its changes in words, which may be none.

        Args:
            rule: the rule.
            has_weight: whether the op has a weight, which the rule may change.
        """
        changes: list[str] = []
        for sort in _SORTS:
            patch: SchemePatch | None = getattr(rule, sort)
            if patch is not None and patch.changes and (has_weight or sort != "weight"):
                changes += self.patch(sort, patch)
        observers = rule.observers
        if observers is not None:
            changes += self._set("observer of activations", observers.activation)
            changes += self._set("observer of weights", observers.weight if has_weight else None)
        changes += self._set("fake quant", rule.fakequant)
        for flag in ("quantize", "quantize_output", "share", "placement", "method"):
            changes += self._set(flag, getattr(rule, flag))
        return changes


_SORTS = {"activation": "activations", "weight": "weights", "output": "its result"}


def _spec(spec: Spec) -> str:
    return dump(spec.to_dict(), flow=True).strip().removesuffix("...").strip()


def _join(changes: list[str]) -> str:
    return " and ".join(changes) or "changes nothing: it was so already"


_ROLES = {
    "compute": "it multiplies by a weight or by another activation, on integers",
    "elementwise": "it makes new values from old ones, on integers",
    "activation": "it makes new values from old ones, and may be fused into the op before it",
    "norm": "it scales and shifts each channel, folded or fused into the op before it where possible",
    "carry": "it only moves values, so integers pass through it as they are",
    "concat": "it joins several tensors into one",
    "float": "it stays float unless a config says quantize: true",
    "shape": "it works on integers and shapes, which are never quantized",
}


@dataclass(frozen=True, repr=False)
class NodeExplanation(Displayed):
    """The explanation of one op, site or input.

    Attributes:
        title: the name of the op, site or input.
        parts: heading -> sentences.
    """

    title: str
    parts: Mapping[str, tuple[str, ...]]

    def _text(self, max_width: int | None) -> str:
        return self.text(max_width)

    def text(self, width: int | None = 100) -> str:
        """Returns paragraphs with their headings at the left; lines of a config are never broken."""
        lines = [self.title]
        for heading, sentences in self.parts.items():
            for index, sentence in enumerate(sentences):
                first = f"  {heading if not index else '':<9} "
                lines += _hang(first, sentence, width)
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Returns the explanation as plain data."""
        return {"name": self.title, **{heading.lower(): list(lines) for heading, lines in self.parts.items()}}


def _hang(first: str, sentence: str, width: int | None) -> list[str]:
    if width is None or "- {" in sentence or ": {" in sentence or len(first) + len(sentence) <= width:
        return [first + sentence]
    return textwrap.wrap(
        sentence,
        max(width, 50),
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=False,
        break_on_hyphens=False,
    )


@dataclass(frozen=True)
class Explainer:
    """Explains the nodes of one graph.

    Attributes:
        index: the annotation of the graph, indexed.
        qconfig: the config of the annotation.
        numbers: group -> its parameters, if calibrated; None for a graph that is not prepared.
        comments: the comment above each rule of the recipe; empty if unknown.
        native: group -> the layer of MegEngine's own quantization that its scale comes from.
        float16: name of an op that stays float -> whether it is in float16; empty if that was not decided.
    """

    index: Index
    qconfig: QConfig
    numbers: Mapping[str, QParams] | None
    comments: tuple[str, ...] = ()
    native: Mapping[str, str] = field(default_factory=dict)
    float16: Mapping[str, Float16Choice] = field(default_factory=dict)

    def explain(self, name: str) -> list[NodeExplanation]:
        """Explains every op, site or input that ``name`` matches.

        Args:
            name: a node, a site, a kind of op, or a glob pattern for module paths and names of nodes, also of
                those in the ONNX file.

        Raises:
            GraphError: when nothing matches; the message lists the nearest names.
        """
        index = self.index
        name = name if name in index.notes or name in index.sites else site_name(name)
        if name in index.notes:
            return [self._op(index.notes[name])]
        if name in index.annotation.inputs:
            return [self._input(name)]
        if name in index.sites:
            return [self._site(index.sites[name])]
        if name in index.at:
            return [self._site(site) for site in index.at[name]]
        notes = [
            note
            for note in index.annotation.notes
            if any(own == name or fnmatch.fnmatchcase(own, name) for own in index.names(note))
        ]
        notes = notes or [n for n in index.annotation.notes if n.kind == name]
        if not notes:
            raise GraphError(
                f"nothing here is called {name!r}: no node, no site, no module{self._near(name)}"
            )
        return [self._op(note) for note in notes]

    def _near(self, name: str) -> str:
        of_ops = dict.fromkeys(own for note in self.index.annotation.notes for own in self.index.names(note))
        known = [*of_ops, *self.index.sites, *self.index.annotation.inputs]
        names = list(dict.fromkeys(difflib.get_close_matches(name, known, n=6, cutoff=0.5)))[:3]
        return f"; the nearest are {', '.join(names)}." if names else "; the table has the names."

    # -- ops ----------------------------------------------------------------------------------------

    def _op(self, note: ExprNote) -> NodeExplanation:
        parts = {
            "What": self._describe_op(note),
            "State": self._state(note),
            "Config": self._changes.describe(note) if note.rule and note.state != "shape" else (),
            "Reads": self._inputs(note),
            "Weight": self._parameters(note),
            "Result": self._result(note),
            "Readers": self._readers(note.name),
        }
        return NodeExplanation(
            note.name, {heading: lines for heading, part in parts.items() if (lines := tuple(part))}
        )

    @cached_property
    def _changes(self) -> Changes:
        annotation = self.index.annotation
        return Changes(annotation.backend, self.qconfig, annotation.origins, self.comments)

    def _describe_op(self, note: ExprNote) -> Iterator[str]:
        module = f"of module {note.path}" if note.path else "of the model's own forward"
        yield f"{note.kind or note.op}: a call of {note.op} in the code {module}."
        if note.rule:
            yield f"Op rule {note.rule} reads it; its role is {note.role}: {_ROLES[note.role]}."
        else:
            yield "No op rule reads it, so nothing is known of how it treats integers."
        placement = self.index.annotation.placement
        if placement is not None and note.name in placement.times:
            in_float, on_integers = placement.times[note.name]
            other = "no kernel" if on_integers is None else f"{on_integers:.3g} ms"
            yield f"Predicted time: {in_float:.3g} ms in float, {other} on integers."
        if note.macs:
            yield f"It takes {note.macs:,} multiplications with accumulation (MACs) at the traced shapes."

    def _state(self, note: ExprNote) -> Iterator[str]:
        if note.state == "int":
            others = [f"{n.name} ({n.kind})" for n in self.index.followers.get(note.name, ())]
            if not others:
                yield "It is computed on integers."
            else:
                kernel = f"as one kernel with {' and '.join(others)}"
                yield f"It is computed on integers, {kernel}: nothing is rounded in between."
            if note.kind in self._proposals.backend.float_kernels:
                runtime = self.index.annotation.backend
                yield (
                    f"{runtime} has no integer kernel for {note.kind}: it computes it in float from the same "
                    "integers and rounds the result to the same integers."
                )
            yield from self._fold(note)
        elif note.state == "fused":
            head = self.index.notes[note.into]
            yield f"It is fused into {head.name} ({head.kind}): the backend computes both as one kernel."
        elif note.state == "carried":
            yield f"It holds the integers of site {note.output} without rounding: {self._way(note)}."
        elif note.state == "float":
            yield from self._why_float(note)
        else:
            yield f"It is never quantized: {note.reason or 'it holds no float32 values of the data'}."
        placement = self.index.annotation.placement
        if note.state == "int" and placement is not None and note.name in placement.reasons:
            yield f"By {placement.reasons[note.name]}."
        if note.reason and note.state in ("int", "fused", "carried"):
            yield f"{note.reason[0].upper()}{note.reason[1:]}."

    def _fold(self, note: ExprNote) -> Iterator[str]:
        fold = self.index.folds.get(note.name)
        if fold is not None:
            yield f"BatchNorm {fold.norm} stays in training; in evaluation it is folded into the layer."

    def _way(self, note: ExprNote) -> str:
        """Along which moves the integers came."""
        names = [note.name]
        while note.state == "carried" and note.reads:
            names.append(note.reads[0])
            before = self.index.notes.get(note.reads[0])
            if before is None:
                break
            note = before
        return " from ".join(names)

    def _why_float(self, note: ExprNote) -> Iterator[str]:
        yield f"It stays float: {note.reason}."
        if len(note.causes) > 1:
            more = " and ".join(_CAUSES[cause] for cause in note.causes[1:])
            yield f"Without that it would stay float still: {more}."
        if note.island:
            others = [n.name for n in self.index.islands[note.island] if n is not note]
            more = f" with {shorten_list(others)}" if others else ""
            borders = "integers become float before it and are rounded again behind it"
            yield f"It makes float island {note.island}{more}: {borders}."
        proposal, remark = self._proposals.for_ops([note])
        if proposal is not None:
            yield "To quantize it:"
            yield from proposal.lines
        choice = self.float16.get(note.name)
        if choice is not None and choice.reason:
            yield f"ONNX files have it in float32, not in float16: {choice.text}."
        elif choice is not None:
            yield "ONNX files have it in float16."
        if remark:
            yield f"{remark[0].upper()}{remark[1:]}."

    @cached_property
    def _proposals(self) -> Proposals:
        return Proposals(self.index, self.qconfig)

    def _inputs(self, note: ExprNote) -> Iterator[str]:
        inside = note.state == "fused"
        groups = dict(zip(note.reads, note.inputs, strict=False))
        if not note.kind:  # nothing is known of it, so it reads what there is
            groups = {name: self.index.group(name) for name in note.reads}
        for name, group in groups.items():
            if inside and name in self._kernel(note):
                yield f"{name}, inside of the kernel, unrounded."
            elif not group and note.state == "int" and note.asks == DYNAMIC:
                yield f"{name}, {note.asks}."
            elif not group:
                yield f"{name}, in float."
            else:
                yield f"{name}, {self._read(note, name, group)}"

    def _kernel(self, note: ExprNote) -> set[str]:
        return {note.into, *(n.name for n in self.index.followers.get(note.into, ()))}

    def _read(self, note: ExprNote, name: str, group: str) -> str:
        """Says how ``note`` reads a quantized input."""
        sites = (s for s in self.index.at.get(name, ()) if s.consumers is not None)
        own = next((s for s in sites if note.name in (s.consumers or ()) and s.name != name), None)
        if own is not None:
            present = self.index.group(name)
            state = f"holds {self.index.scheme(present)} otherwise" if present else "is float otherwise"
            others = [c for c in own.consumers or () if c != note.name]
            more = f" and {shorten_list(others)}" if others else ""
            rounding = self._describe_rounding(group)
            return f"rounded at site {own.name} for this op{more}, since {name} {state}: {rounding}"
        if name in self.index.annotation.carried:
            factor = self.index.annotation.factors.get(name)
            scaled = f", which stand for {factor:g} times the values there" if factor else ""
            return f"which carries the integers of site {group}{scaled}: {self._describe_rounding(group)}"
        return f"rounded at site {group}: {self._describe_rounding(group)}"

    def _describe_rounding(self, group: str) -> str:
        plan = self.index.plan(group)
        if plan is None:
            return "as its layer says."
        observer = f"observer {_format_options(plan.observer, plan.observer_options)}"
        fake = f"fake quant {_format_options(plan.fakequant, plan.fakequant_options)}"
        return f"{plan.scheme.describe()}, {observer}, {fake}{self._measured(group)}."

    def _measured(self, group: str) -> str:
        if self.numbers is None:
            return ""
        qparams = self.numbers.get(group)
        own = f", from the model's own quantization ({self.native[group]})" if group in self.native else ""
        return f"; {_table.describe(qparams)}{own}" if qparams is not None else "; not calibrated"

    def _parameters(self, note: ExprNote) -> Iterator[str]:
        if note.weight:
            site = self.index.sites[note.weight]
            calls = len(site.consumers or ())
            used = f", one site for its {calls} calls" if calls > 1 else ""
            yield f"{site.node}, rounded at site {site.name}{used}: {self._describe_rounding(site.group)}"
        bias = self.index.biases.get(note.name)
        if bias is not None:
            yield f"Bias {bias.node}: {self._bias(bias)}."

    def _bias(self, site: Site) -> str:
        measured = _table.describe_bias(self.numbers or {}, site)
        scaled = f" times {site.factor:g}" if site.factor != 1.0 else ""
        how = f"int32 at the scale of {site.activation}{scaled} times that of {site.weight}"
        return f"{how}: {measured}" if measured else how

    # -- results and their readers ------------------------------------------------------------------

    def _result(self, note: ExprNote) -> Iterator[str]:
        if note.state == "shape":
            return
        if not self.index.is_last(note):
            yield "No site: it lies inside of the kernel."
            return
        yield from self._sites_at(note.name)
        if note.state == "carried":
            yield f"No site of its own: the integers of {note.output} pass through."
        elif not self.index.at.get(note.name) and not note.output:
            yield "No site: no reader asks for integers."
        elif not self.index.at.get(note.name):
            yield f"No site of its own: the backend ties it to the inputs, which share group {note.output}."

    def _sites_at(self, node: str) -> Iterator[str]:
        for site in self.index.at.get(node, ()):
            if site.sort != "activation":
                continue
            whole = site.consumers is None or site.name == node
            readers = "all its readers" if whole else f"{shorten_list(site.consumers or ())} only"
            yield f"Site {site.name}, for {readers}: {self._describe_rounding(site.group)}"
            yield from self._sharing(site)

    def _sharing(self, site: Site) -> Iterator[str]:
        others = [s.name for s in self.index.members[site.group] if s.name != site.name]
        if others:
            yield f"It shares the parameters of group {site.group} with {shorten_list(others)}."

    def _readers(self, node: str) -> Iterator[str]:
        for note in self.index.readers.get(node, ()):
            if note.state == "shape":
                continue
            reader = f"{note.name} ({note.kind or note.op})"
            if note.asks:
                verb = (
                    "moves values, and asks for what its readers want:"
                    if note.role == "carry"
                    else "asks for"
                )
                yield f"{reader} {verb} {note.asks}."
            elif note.state == "fused":
                yield f"{reader} is part of the kernel and asks for nothing."
            elif note.role == "carry":
                yield f"{reader} asks for nothing: not all its readers do, or not for the same."
            else:
                yield f"{reader} reads it in float and asks for nothing."
        if node in self.index.annotation.outputs:
            yield "It leaves the graph."

    # -- what is no op ------------------------------------------------------------------------------

    def _input(self, name: str) -> NodeExplanation:
        result = tuple(self._sites_at(name)) or ("No site: no reader asks for integers.",)
        readers = tuple(self._readers(name))
        parts = {"What": ("An input of the graph.",), "Result": result}
        return NodeExplanation(name, {**parts, "Readers": readers} if readers else parts)

    def _site(self, site: Site) -> NodeExplanation:
        sentences = [f"A site for {_SITES[site.sort]} {site.node}."]
        if site.static:
            sentences.append("It is a parameter: observed once, not at every batch.")
        if site.sort == "bias":
            how = f"{self._bias(site)}; it has no parameters of its own."
        else:
            how = self._describe_rounding(site.group)
        readers = shorten_list(site.consumers) if site.consumers else "every reader of the node"
        parts = {
            "What": tuple(sentences),
            "Rounds": (how, *self._sharing(site)),
            "Readers": (f"For {readers}.",),
        }
        return NodeExplanation(site.name, parts)


_SITES = {"activation": "the activation", "weight": "the weight", "bias": "the bias"}
_CAUSES = {
    "rule": "the config says quantize: false",
    "role": "it is kept in float on purpose",
    "range": "one grid would spoil a part of its values",
    "selection": "a selection depends on it, or it on a selection",
    "infinity": "it reads or writes a number that stands for infinity",
    "dtype": "its values are not float32",
    "kernel": "the backend has no integer kernel for it",
    "speed": "it is no faster on integers",
    "method": "the config's method leaves what it reads in float",
}


def _format_options(name: str, options: tuple[tuple[str, Any], ...]) -> str:
    return f"{name}({', '.join(f'{k}={v}' for k, v in options)})" if options else name

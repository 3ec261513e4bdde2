"""explain: every decision of annotate, as a table, a summary, a story, a drawing, or data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from qtrace.config import QConfig
from qtrace.config.recipe import config_or_default
from qtrace.config.written import resolve_recipe
from qtrace.display import Displayed
from qtrace.graph.open_axes import describe_sizes
from qtrace.graph.origin import read_origin
from qtrace.graph.types import TracedModule
from qtrace.inspection.explanation import _table
from qtrace.inspection.explanation._dot import to_dot
from qtrace.inspection.explanation._summary import Proposals, Summary
from qtrace.inspection.explanation._table import Index, describe_algorithms, op_table
from qtrace.inspection.explanation._why import Explainer, NodeExplanation
from qtrace.plugins.options import check_arguments
from qtrace.preparation.annotation import Annotation
from qtrace.preparation.float16 import Float16Choice, choose_float16, describe_float16, uses_float16
from qtrace.preparation.model import QuantizedModel, is_quantized
from qtrace.preparation.prepare import plan_graph, read_request
from qtrace.process import paused_collector
from qtrace.scheme import QParams


@dataclass(frozen=True, repr=False)
class Explanation(Displayed):
    """The decisions for one graph.

    Attributes:
        annotation: a note for every op, and the sites.
        qconfig: the config of the annotation.
        numbers: group -> its parameters, if calibrated; None for a model that is not prepared.
        comments: the comment above each rule of the recipe; empty without a recipe.
        ptq: the reports of the post-training algorithms, for a prepared or converted model.
        native: group -> the layer of MegEngine's own quantization that its scale comes from.
        native_notes: a line for each scale of the model that was changed or is not used.
        sizes: which axes of the inputs are open, in words.
        float16: which of the ops that stay float are in float16, and why others are not. It is None if the
            config does not ask for it, or the graph is not calibrated.
        of_file: name of a node -> its names in the ONNX file that the graph was imported from.
    """

    annotation: Annotation
    qconfig: QConfig
    numbers: Mapping[str, QParams] | None = None
    comments: tuple[str, ...] = ()
    ptq: tuple[dict[str, Any], ...] = ()
    native: Mapping[str, str] = field(default_factory=dict)
    native_notes: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    float16: tuple[Float16Choice, ...] | None = None
    of_file: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @cached_property
    def _index(self) -> Index:
        return Index(self.annotation, self.of_file)

    @cached_property
    def _summary(self) -> Summary:
        return Summary(self._index, Proposals(self._index, self.qconfig), self.comments, self.sizes)

    def table(self, max_width: int | None = 160, *, every: bool = False, colour: bool = False) -> str:
        """Returns a text table, one row for each op, and below it the summary.

        Args:
            max_width: the largest width in characters; None for no limit.
            every: show ops on shapes and constants, too.
            colour: set states apart by ANSI colours.
        """
        rows = op_table(self._index, max_width, every, colour)
        return f"{rows}\n\n{self.summary(max_width)}"

    def summary(self, max_width: int | None = 100) -> str:
        """Says how much computes on integers, what stays float and why, and which lines would change it.

        Args:
            max_width: the largest width in characters; None for no limit.
        """
        algorithms = ["", "Post-training algorithms:", *self.algorithms()] if self.ptq else []
        return "\n".join([self._summary.text(max_width), *self._halves(), *self._native(), *algorithms])

    def _halves(self) -> list[str]:
        """Says how many of the ops that stay float are in float16, and why the others are not."""
        if self.float16 is not None:
            return ["", *describe_float16(self.float16)]
        asked = self.qconfig.effective_float == "fp16"
        return (
            ["", "float16: the ranges of a calibration decide which ops in float have it."] if asked else []
        )

    def _native(self) -> list[str]:
        """Says how many scales are the model's own, and which were changed or are not used."""
        groups = {site.group for site in self.annotation.sites if site.sort != "bias"}
        if not self.native and not self.native_notes:
            return []
        others = sorted(groups - set(self.native))
        rest = f"; calibrated from data: {', '.join(others)}" if self.native and others else ""
        count = f"{len(self.native)} of {len(groups)} scales{rest}"
        return ["", f"From the model's own quantization: {count}.", *(f"  {n}" for n in self.native_notes)]

    def algorithms(self) -> list[str]:
        """Lists what each post-training algorithm changed, what it left and why, and the errors.

        Lines of qtrace are summed up. An algorithm of your own has all lines of its `qtrace.ptq.Report`.
        """
        return describe_algorithms(self.ptq)

    def why(self, name: str) -> list[NodeExplanation]:
        """Explains a node, a site, or every op of a module in full.

        Args:
            name: a node, a site, a kind of op, or a glob pattern for module paths and names of nodes, also of
                those in the ONNX file.

        Raises:
            GraphError: when nothing matches; the message lists the nearest names.
        """
        halves = {choice.op: choice for choice in self.float16 or ()}
        explainer = Explainer(self._index, self.qconfig, self.numbers, self.comments, self.native, halves)
        return explainer.explain(name)

    def dot(self, *, every: bool = False) -> str:
        """Returns the graph for Graphviz: ops coloured by state, sites as diamonds.

        Args:
            every: draw ops on shapes and constants, too.
        """
        return to_dot(self._index, every)

    def to_dict(self) -> dict[str, Any]:
        """Returns the explanation as plain data."""
        data: dict[str, Any] = json.loads(self.annotation.to_json())
        comments = self.comments or ("",) * len(self.qconfig.rules)
        rules = zip(self.annotation.origins, comments, self.qconfig.rules, strict=True)
        data["rules"] = [{"origin": o, "comment": c, **rule.to_dict()} for o, c, rule in rules]
        numbers = self.numbers or {}
        for site, plain in zip(self.annotation.sites, data["sites"], strict=True):
            plain["qparams"] = _table.of_site(numbers, site)
            if site.group in self.native:
                plain["native"] = self.native[site.group]
        own: dict[str, Any] = {"native_notes": list(self.native_notes)} if self.native_notes else {}
        if self.float16 is not None:
            own["float16"] = [vars(choice) for choice in self.float16]
        return {"summary": self._summary.to_dict(), "ptq": list(self.ptq), **own, **data}


@check_arguments
def explain(
    model: TracedModule,
    qconfig: QConfig | str | Path | Mapping[str, Any] | None = None,
    *,
    allow_code: bool = False,
) -> Explanation:
    """Explains for every op what is quantized, by which rule, or why it stays float.

    Args:
        model: a traced module (what ``prepare`` would decide), or a prepared or converted one (what it did).
        qconfig: the config, for a traced module, as for ``prepare``; None for the default. For a named
            recipe, the explanation includes the comments above its rules.
        allow_code: whether a recipe that is named may name code, as for ``load_recipe``.
    """
    if is_quantized(model):
        view = QuantizedModel(model)
        config = view.config.with_origin("the config", view.annotation.origins)
        record = view.record
        return Explanation(
            view.annotation,
            config,
            _table.numbers(view),
            ptq=view.ptq,
            native=_table.describe_native(view),
            native_notes=record.native_notes,
            sizes=tuple(describe_sizes(model)),
            float16=choose_float16(view) if uses_float16(view) and record.float_ranges else None,
            of_file=_names_of_file(model),
        )
    comments: tuple[str, ...] = ()
    if isinstance(qconfig, (str, Path)):
        recipe = resolve_recipe(qconfig, allow_code=allow_code)
        config = recipe.config
        comments = tuple(" ".join(e.comment) for e in recipe.entries if e.keys == ("rules",))
    else:
        config = config_or_default(qconfig)
    with paused_collector():
        sizes = tuple(describe_sizes(model))
        graph, annotation = plan_graph(model, read_request(model, config))
        of_file = _names_of_file(graph)
        return Explanation(annotation, config, comments=comments, sizes=sizes, of_file=of_file)


def _names_of_file(model: TracedModule) -> dict[str, tuple[str, ...]]:
    """Maps each node to its names in the ONNX file that a graph was imported from."""
    origin = read_origin(model)
    return {} if origin is None else {name: result.names for name, result in origin.results.items()}

"""What verify knows of a file that has ops in float16: the graph rounds their results, too.

Engines compute float16 with different digits inside: the result of an op differs in its last bits, and an
integer after it where the value lies at a border of two. How far values may be off is measured: as far as
float16 changes them in the graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qtrace.export.converted import FLOAT16_KEY
from qtrace.graph.types import Constant, GetAttr, Node, TensorNode
from qtrace.graph.walk import exprs, is_float_tensor
from qtrace.numerics import quantize
from qtrace.preparation.model import QuantizedModel
from qtrace.scheme import QParams
from qtrace.verification.graph_runs import Lanes
from qtrace.verification.selections import FirstOfEquals

# A value may be off by so many times the largest difference that float16 makes in the graph, as the runtime
# rounds elsewhere.
_ALLOWED = 4.0


def read_float16_ops(model: Any) -> tuple[str, ...]:
    """Returns the ops of the graph that an ONNX model has in float16, by the names of their first outputs."""
    listed = next((entry.value for entry in model.metadata_props if entry.key == FLOAT16_KEY), "")
    return tuple(listed.split())


class Float16Rounding:
    """Rounds what a file has in float16, and says which integers after it are right.

    Args:
        model: the converted graph.
        ops: the ops in float16, by the names of their first outputs.

    Attributes:
        parameters: the names of the parameters that are in float16.
        sources: node of a rounded value -> the node that is rounded, for those that depend on float16.
        tolerances: node of a rounded value -> how far what is rounded may be off in the batch of `measure`.
        count: the number of ops in float16.
    """

    def __init__(self, model: QuantizedModel, ops: Sequence[str]) -> None:
        self.model, self.tolerances, self.count = model, dict[str, float](), len(ops)
        chosen = {e for e in exprs(model.module) if e.outputs and e.outputs[0].name in set(ops)}
        results = {node for expr in chosen for node in expr.outputs if is_float_tensor(node)}
        read = {node for expr in chosen for node in expr.inputs if is_float_tensor(node)}
        stored = (node for node in read if isinstance(node.expr, (GetAttr, Constant)))
        # A parameter that others read, too, stays float32 for these; then its rounding is not simulated.
        self.parameters = frozenset(node.name for node in stored if set(node.users) <= chosen)
        self._rounded = frozenset(node.name for node in results) | self.parameters
        self.sources = _sources(model, results)
        self._last: tuple[Any, Any] = (None, None)

    def round(self, node: Node, value: Any) -> Any:
        """Returns the value of a node as float16 holds it, or unchanged if the file has it in float32.

        The same value gives the same tensor, so that lanes go on with one.
        """
        if node.name not in self._rounded:
            return value
        if self._last[0] is not value:
            with np.errstate(over="ignore"):
                rounded = value.numpy().astype(np.float16).astype(np.float32)
            self._last = (value, type(value)(rounded))
        return self._last[1]

    def measure(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Measures how far float16 changes what sites round in a batch, each from the same integers."""
        exact = _Exact(self)
        rounded = _Rounded(self, exact)
        Lanes(self.model.module, {*self.parameters, *self.sources}).run([exact, rounded], args, kwargs)
        sources = ((name, rounded.errors.get(source.name, 0.0)) for name, source in self.sources.items())
        self.tolerances = {name: _ALLOWED * error for name, error in sources if error}

    def nearest(
        self, node: Node, unrounded: Any, graph: np.ndarray, runtime: np.ndarray, qparams: QParams
    ) -> np.ndarray:
        """Returns for each integer of the runtime the nearest one that float16 explains.

        Args:
            node: the node that holds the rounded value.
            unrounded: the value that the site rounds, as the graph computes it from the same integers.
            graph: the graph's integers.
            runtime: the runtime's integers.
            qparams: the parameters of both.
        """
        tolerance = self.tolerances.get(node.name)
        if tolerance is None or unrounded is None or runtime.shape != graph.shape:
            return graph
        values = unrounded.numpy()
        low, high = (quantize(values + offset, qparams) for offset in (-tolerance, tolerance))
        return np.clip(runtime, low, high).astype(graph.dtype)


def _sources(model: QuantizedModel, results: set[TensorNode]) -> Mapping[str, TensorNode]:
    """Returns rounded node -> what it rounds, for values that depend on float16 since the last rounding."""
    sites = {
        site.expr: site for site in model.rounded.values() if site.sort == "activation" and not site.static
    }
    behind: set[Node] = set()
    sources: dict[str, TensorNode] = {}
    for expr in exprs(model.module):
        if expr in sites:
            site = sites[expr]
            if site.source in behind:
                sources[site.value.name] = site.source
        elif not behind.isdisjoint(expr.inputs) or not results.isdisjoint(expr.outputs):
            behind.update(expr.outputs)
    return sources


class _Exact(FirstOfEquals):
    """Runs the graph in float32, and keeps the current values of roundings and of what they round."""

    def __init__(self, file: Float16Rounding) -> None:
        super().__init__(file.model.module)
        self.kept = {*file.sources, *(source.name for source in file.sources.values())}
        self.values: dict[str, Any] = {}

    def on_node(self, node: Node, value: Any) -> Any:
        if node.name in self.kept:
            self.values[node.name] = value
        return value


class _Rounded(FirstOfEquals):
    """Runs the graph with float16, and goes on from the roundings of the other run."""

    def __init__(self, file: Float16Rounding, exact: _Exact) -> None:
        super().__init__(file.model.module)
        self.file, self.exact = file, exact
        self.errors: dict[str, float] = {}

    def on_node(self, node: Node, value: Any) -> Any:
        if node.name in self.file.sources:
            return self.exact.values.pop(node.name)
        value = self.file.round(node, value)
        other = self.exact.values.get(node.name)
        if other is not None and other is not value and other.shape == value.shape:
            error = np.abs(value.numpy().astype(np.float64) - other.numpy())
            self.errors[node.name] = max(self.errors.get(node.name, 0.0), float(error.max(initial=0.0)))
        return value

"""A converted graph as every exporter reads it: ops in order, sites as objects, parameters, shapes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from megengine.module import Module

from qtrace import ops
from qtrace.export.converted.shapes import shapes_of
from qtrace.export.converted.values import input_names, integer_values
from qtrace.fakequant.base import FakeQuant
from qtrace.fakequant.following.bias import BIAS_QMAX, BiasQuant
from qtrace.graph.types import Constant, Expr, GetAttr, Node, TensorNode, TracedModule
from qtrace.graph.walk import exprs, owner, users
from qtrace.numerics import quantize, quantize_bias
from qtrace.ops import OpCall
from qtrace.preparation.annotation import Site, Sort
from qtrace.preparation.record import carried_qparams, read_record
from qtrace.scheme import QParams

__all__ = ["ConvertedGraph", "ConvertedOp", "ConvertedSite"]


@dataclass(frozen=True, eq=False)
class ConvertedOp:
    """An op that computes or moves values.

    Attributes:
        expr: the expr of the graph.
    """

    expr: Expr

    @cached_property
    def call(self) -> OpCall | None:
        """The expr as its rule reads it; None without a rule for it."""
        return ops.read(self.expr)


@dataclass(frozen=True, eq=False)
class ConvertedSite:
    """A quantized tensor and the call that rounds it.

    Attributes:
        decision: what annotate decided for the site.
        expr: the call of the fake quant.
        node: the node whose value is quantized; not the result of another rounding.
        source: the node that the call reads: `node`, or `node` as another site rounds it.
        value: the node that holds the rounded value.
        fake_quant: the module that rounds: a `FakeQuant`, for a bias a `BiasQuant`.
    """

    decision: Site
    expr: Expr
    node: TensorNode
    source: TensorNode
    value: TensorNode
    fake_quant: Any

    @property
    def name(self) -> str:
        """The name of the site."""
        return self.decision.name

    @property
    def sort(self) -> Sort:
        """Whether the site is an activation, a weight or a bias."""
        return self.decision.sort

    @property
    def consumers(self) -> tuple[Expr, ...]:
        """The exprs that read the rounded value."""
        return tuple(users(self.value))

    @cached_property
    def qparams(self) -> QParams:
        """The quantization parameters of an activation or a weight."""
        qparams: QParams = self.fake_quant.qparams()
        return qparams

    @cached_property
    def bias_scale(self) -> np.ndarray:
        """The scale of a bias, float32 of shape ``()`` or ``(channels,)``: input scale times weight scale."""
        groups = (node.owner for node in self.expr.args[2:])
        scale = self.fake_quant.scale(*groups)[0].numpy().astype(np.float32)
        return scale.reshape(-1) if scale.ndim else scale

    def integers(self, parameter: np.ndarray) -> np.ndarray:
        """The integers (int32) to which the site rounds a stored value.

        Args:
            parameter: the value of `source`.

        Returns:
            An array of the shape of ``parameter``; of a bias, a vector.
        """
        if self.sort == "bias":
            return quantize_bias(parameter.reshape(-1), self.bias_scale, BIAS_QMAX)
        if self.sort == "weight":
            return integer_values(self.fake_quant, parameter)
        return quantize(parameter, self.qparams)

    def rounded_bias(self, parameter: np.ndarray) -> np.ndarray:
        """The float32 values that the integers of a bias stand for, in the shape of ``parameter``."""
        return (self.integers(parameter) * self.bias_scale).astype(np.float32).reshape(parameter.shape)


class ConvertedGraph:
    """One reading of a module made by ``qtrace.convert``.

    Args:
        converted: the module; it is not changed.

    Attributes:
        module: the module.
        record: how the module was quantized.
        annotation: the decisions that were executed.
        steps: ops and roundings in the order of execution; parameters and constants stand in `values`.
        sites: every site whose rounding stands in the graph, in the order of the annotation.
        inputs: input node -> its name as an argument of the traced module.
        outputs: the nodes that leave the graph.

    Raises:
        GraphError: when the module is not converted.
    """

    def __init__(self, converted: TracedModule) -> None:
        self.module = converted
        self.record = read_record(converted, "converted")
        self.annotation = self.record.annotation
        self.inputs: dict[TensorNode, str] = dict(
            zip(converted.graph.inputs[1:], input_names(converted), strict=True)
        )
        self.outputs: list[TensorNode] = converted.graph.outputs
        self._site_of: dict[Node, ConvertedSite] = {}
        decisions = {site.name: site for site in self.annotation.sites}
        steps = (e for e in exprs(converted) if not isinstance(e, (GetAttr, Constant)))
        self.steps = tuple(
            self._site(expr, module, decisions)
            if isinstance(module := owner(expr), (FakeQuant, BiasQuant))
            else ConvertedOp(expr)
            for expr in steps
        )
        self._ops = {step.expr: step for step in self.steps if isinstance(step, ConvertedOp)}
        known = {site.name: site for site in self._site_of.values()}
        self.sites = tuple(known[name] for name in decisions if name in known)

    def _site(self, expr: Expr, module: Module, decisions: dict[str, Site]) -> ConvertedSite:
        source, value = expr.args[1], expr.outputs[0]
        before = self._site_of.get(source)
        node = source if before is None else before.node
        # MegEngine numbers a name that is taken: two sites of one node, or a node that the user calls so.
        name = re.sub(r"_q_\d+$", "_q", value.name)
        decision = decisions[name.removesuffix("_q")]
        self._site_of[value] = ConvertedSite(decision, expr, node, source, value, module)
        return self._site_of[value]

    @property
    def ops(self) -> tuple[ConvertedOp, ...]:
        """The ops in the order of execution."""
        return tuple(self._ops.values())

    def attribute(self, expr: GetAttr | Constant) -> Any:
        """The parameter, constant or module that ``expr`` gives."""
        return expr.interpret(self.module)[0] if isinstance(expr, GetAttr) else expr.value

    @cached_property
    def values(self) -> dict[Node, np.ndarray]:
        """Node of a parameter or a constant -> its value."""
        return self.values_of(exprs(self.module))

    def values_of(self, among: Iterable[Expr]) -> dict[Node, np.ndarray]:
        """`values` of those of the exprs ``among`` that give a parameter or a constant."""
        return {
            expr.outputs[0]: self.attribute(expr).numpy()
            for expr in among
            if isinstance(expr, (GetAttr, Constant)) and isinstance(expr.outputs[0], TensorNode)
        }

    @cached_property
    def nodes(self) -> dict[str, Node]:
        """Name -> node, for the inputs of the graph and what its exprs give."""
        named: dict[str, Node] = {n.name: n for n in self.module.graph.inputs}
        named.update((n.name, n) for e in exprs(self.module) for n in e.outputs)
        return named

    @cached_property
    def carried(self) -> dict[str, QParams]:
        """Name of a node that carries integers without rounding -> their parameters."""
        return carried_qparams(self.module, self.annotation)

    @cached_property
    def moved(self) -> dict[str, QParams]:
        """`carried` without the outputs of ops that do nothing: the nodes that an export writes anew."""
        return {name: self.carried[name] for name in self.annotation.moved()}

    @cached_property
    def shapes(self) -> dict[Node, tuple[int, ...]]:
        """Node -> its shape, for inputs of the shapes that were traced; found by running the graph."""
        return shapes_of(self.module)

    def call(self, expr: Expr) -> OpCall | None:
        """``expr`` as its rule reads it; None for a rounding, a parameter, and an expr without a rule."""
        op = self._ops.get(expr)
        return None if op is None else op.call

    def site_of(self, node: Node) -> ConvertedSite | None:
        """The site whose rounded value ``node`` holds."""
        return self._site_of.get(node)

    def site_name(self, node: Node) -> str:
        """The name of integers that ``node`` holds: that of its site, else that of the node."""
        site = self.site_of(node)
        return node.name if site is None else site.name

    def value_name(self, node: Node) -> str:
        """The name of the node whose value ``node`` holds, rounded or not."""
        site = self.site_of(node)
        return node.name if site is None else site.node.name

"""The base of the rules that turn the pieces of a composite into one call."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import megengine.functional as F

from qtrace.graph.edit import GraphEditor
from qtrace.graph.pattern import PatternMatch
from qtrace.graph.rewrite import RewriteRule
from qtrace.graph.types import Node
from qtrace.graph.walk import shape_of

__all__ = ["CompositeCall", "CompositeRule"]


class CompositeCall(NamedTuple):
    """The call of a function that stands for the pieces.

    Attributes:
        function: a function of MegEngine or of ``qtrace.graph.functions``.
        args: its arguments: nodes and plain values.
        shapes: position of an argument -> the shape that a stored tensor must have there.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    shapes: Mapping[int, tuple[int, ...]] = {}


class CompositeRule(RewriteRule):
    """Replaces the pieces that compute one known function of ``x`` by a call of it.

    The docstring of a rule has its formula and its source.

    Attributes:
        title: name of the function in messages and pages.
        formula: the function as a formula.
        becomes: the name of the call.
        in_prepare: whether ``prepare`` applies the rule, which it does unless the pieces have integer kernels
            and the call does not.
        kind: the op kind that a backend must quantize for ``prepare`` to apply the rule; "" for any backend.
        keeps_shape: whether the result must have the shape of ``x``.
    """

    title: ClassVar[str]
    formula: ClassVar[str]
    becomes: ClassVar[str]
    from_outputs = True
    in_prepare: ClassVar[bool] = True
    kind: ClassVar[str] = ""
    keeps_shape: ClassVar[bool] = True

    def check(self, match: PatternMatch) -> str | None:
        """Returns None if ``match`` is the composite, else the reason why not, as a clause."""
        x = match["x"]
        if x.shape is None or match.node.shape is None:
            return "the trace has no shapes"
        if self.keeps_shape and shape_of(x) != shape_of(match.node):
            return f"its constants change the shape from {shape_of(x)} to {shape_of(match.node)}"
        return self.obstacle(match)

    def obstacle(self, match: PatternMatch) -> str | None:
        """Returns the reason in numbers, axes and shapes why ``match`` is not the composite, or None."""
        return None

    @abstractmethod
    def call(self, match: PatternMatch) -> CompositeCall:
        """Returns the call that replaces ``match``."""

    def rewrite(self, match: PatternMatch, editor: GraphEditor) -> Mapping[Node, Node]:
        """Puts the call in the place of the last piece, under its name."""
        call, after, out = self.call(match), match.exprs[0], match.node
        new = editor.call_function(call.function, *self.reshaped(call, editor), after=after, like=out)
        editor.put_in_place(new, out)
        return {}

    @staticmethod
    def reshaped(call: CompositeCall, editor: GraphEditor) -> list[Any]:
        """Returns the arguments of ``call``, with the stored tensors in the shapes that it needs."""
        args = list(call.args)
        for position, shape in call.shapes.items():
            node = args[position]
            if node is not None and shape_of(node) != shape:
                args[position] = editor.call_function(F.reshape, node, shape, after=node.expr, like=node)
                args[position].shape = shape
        return args

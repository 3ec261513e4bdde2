"""Turns composites that are written in pieces into one call: hard swish, GELU, LayerNorm, attention ...

Exporters write a function that their format lacks as several small ops. Quantized piece by piece such a
function loses accuracy and speed. Each rule has its formula and its source.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import megengine.functional as F

from qtrace.errors import GraphError
from qtrace.graph.edit import GraphEditor
from qtrace.graph.pattern import PatternMatch
from qtrace.graph.rewrite import RewriteRule, RuleResult, apply_rules
from qtrace.graph.types import Node, TracedModule
from qtrace.graph.walk import exprs, owner, shape_of
from qtrace.plugins import COMPOSITES, load_installed

# The base of the rules that turn the pieces of a composite into one call.


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
        function: what is called, where ``x`` is the only argument.
        in_prepare: whether ``prepare`` applies the rule, which it does unless the pieces have integer kernels
            and the call does not.
        kind: the op kind that a backend must quantize for ``prepare`` to apply the rule; "" for any backend.
        keeps_shape: whether the result must have the shape of ``x``.
    """

    title: ClassVar[str]
    formula: ClassVar[str]
    becomes: ClassVar[str]
    function: ClassVar[Callable[[Any], Any]]
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

    def call(self, match: PatternMatch) -> CompositeCall:
        """Returns the call that replaces ``match``: of `function` with ``x``."""
        return CompositeCall(type(self).function, (match["x"],))

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


# A rule stands before those whose composite is a part of its own: hard swish contains a hard sigmoid.
_FILES = ("activations", "norms", "arrangements")


@functools.cache
def composite_rules() -> tuple[CompositeRule, ...]:
    """Returns the rules in the order in which `compose` applies them.

    Installed packages add composites by the group ``qtrace.composites``. These come first: their pieces may
    contain composites of qtrace's own.

    Raises:
        ConfigError: when a rule of an installed package cannot be imported, or is no `CompositeRule`.
    """
    modules = [importlib.import_module(f"{__name__}.{name}") for name in _FILES]
    own = tuple(rule for module in modules for rule in module.RULES)
    return (*load_installed(COMPOSITES, CompositeRule), *own)


def compose(traced: TracedModule, rules: Sequence[CompositeRule] | None = None) -> list[RuleResult]:
    """Replaces the pieces of every known composite by one call.

    The call takes the name of the last piece. Weights stay the parameters that they are. The result computes
    what the pieces compute, up to the rounding of float32.

    Args:
        traced: a flat traced module (``qtrace.graph.flatten`` makes one); it is edited in place.
        rules: the rules to apply, in order; None for all `composite_rules`.

    Returns:
        A result for each composite that was replaced, and for each that has the form of one but other
        numbers, axes or shapes, with the reason.

    Raises:
        GraphError: when ``traced`` is not flat.
    """
    nested = next((e for e in exprs(traced) if isinstance(owner(e), TracedModule)), None)
    if nested is not None:
        name = nested.outputs[0].name if nested.outputs else "a submodule"
        raise GraphError(
            f"{name} calls a traced submodule, but compose edits flat graphs: call qtrace.graph.flatten."
        )
    results = apply_rules(traced, composite_rules() if rules is None else rules)
    inside = {(r.rule, piece) for r in results for piece in r.pieces - {r.where}}
    return [r for r in results if r.applied or not (r.partial or (r.rule, r.where) in inside)]

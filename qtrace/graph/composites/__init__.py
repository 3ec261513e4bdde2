"""Turns composites that are written in pieces into one call: hard swish, GELU, LayerNorm, attention ...

Exporters write a function that their format lacks as several small ops. Quantized piece by piece such a
function loses accuracy and speed. Each rule has its formula and its source.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence

from qtrace.errors import GraphError
from qtrace.graph.composites.base import CompositeRule
from qtrace.graph.rewrite import RuleResult, apply_rules
from qtrace.graph.types import TracedModule
from qtrace.graph.walk import exprs, owner
from qtrace.plugins import COMPOSITES, load_installed

__all__ = ["CompositeRule", "compose", "composite_rules"]

# A rule stands before those whose composite is a part of its own: hard swish contains a hard sigmoid.
_FILES = ("activations", "norms", "attention", "arrangements", "scale_and_shift")


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

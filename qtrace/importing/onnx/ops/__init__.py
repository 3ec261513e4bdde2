"""The table of lowerings: how each ONNX op is written with MegEngine's functions and modules.

A lowering is a function of a `Call`: it reads the node's inputs (``call.tensor(0)``, ``call.operand(1)``,
``call.ints(1)``) and attributes (``call.attribute("axis", 1)``), adds ops (``call.function(F.relu, x)``,
``call.module(M.Conv2d(...), {"weight": stored}, x)``) and returns the node of each output. Where MegEngine
lacks an equal it calls ``call.refuse("has ...")`` before it adds an op; it never approximates.
``call.version`` is the opset in which the op got the definition that the file means. Attributes that a
lowering does not look at are refused, and so is a result of another shape than ONNX infers. Where a lowering
refuses a form of an op that ONNX defines by a function body, the nodes of the body are lowered instead.

Each family is a module with a table ``LOWERINGS`` from (domain, op) to lowering.
"""

from __future__ import annotations

from collections.abc import Mapping

from qtrace.importing.onnx.call import Lowering
from qtrace.importing.onnx.ops import arithmetic, conv, linear, moves, norm, pick, resize
from qtrace.importing.onnx.rewriting import LINEAR

_FAMILIES = (arithmetic, conv, linear, moves, norm, pick, resize)

LOWERINGS: Mapping[tuple[str, str], Lowering] = {
    **{("", op): lowering for family in _FAMILIES for op, lowering in family.LOWERINGS.items()},
    LINEAR: linear.lower_linear,
}

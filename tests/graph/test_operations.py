"""Every spelling of an operation is read alike, for patterns of calls and for patterns of formulas."""

from __future__ import annotations

from typing import Any

import megengine.functional as F
from megengine.core._imperative_rt.core2 import apply
from megengine.core.ops import builtin

from qtrace.graph.operations import canonical_call, possible_kinds, read_operation
from qtrace.graph.types import Apply
from tests.each import each_of
from tests.graph.samples import function


def _kernel(mode: str, *operands: Any) -> Any:
    return apply(builtin.Elemwise(mode=getattr(builtin.Elemwise.Mode, mode)), *operands)[0]


SPELLINGS: dict[str, tuple[Any, ...]] = {
    "mul": (lambda x: x * x, lambda x: F.mul(x, x), lambda x: x.__mul__(x), lambda x: _kernel("MUL", x, x)),
    "sub": (lambda x: 2.0 - x, lambda x: F.sub(2.0, x), lambda x: x.__rsub__(2.0)),
    "neg": (lambda x: -x, lambda x: F.neg(x), lambda x: _kernel("NEGATE", x)),
    "reshape": (lambda x: x.reshape(2, -1), lambda x: F.reshape(x, (2, -1)), lambda x: x.reshape((2, -1))),
    "mean": (lambda x: x.mean(axis=1), lambda x: F.mean(x, 1)),
}


@each_of("kind", SPELLINGS)
def test_every_spelling_is_one_operation(kind: str) -> None:
    calls, settings = [], []
    for spelling in SPELLINGS[kind]:
        traced = function(spelling)
        output = traced.graph.outputs[0]
        call, operation = canonical_call(output.expr), read_operation(output)
        assert call is not None
        assert operation is not None
        assert (operation.kind, possible_kinds(output.expr)) == (kind, (kind,))
        calls.append((call.op, [str(value) for value in call.arguments]))
        settings.append(([str(value) for value in operation.operands], operation.settings))
    assert all(call == calls[0] for call in calls)
    assert all(setting == settings[0] for setting in settings)


def test_a_kernel_without_a_function_is_an_operation_of_its_own() -> None:
    texts = []
    for mode in ("FUSE_MUL_ADD3", "FUSE_MUL_ADD3", "COND_LEQ_MOV"):
        traced = function(lambda x, mode=mode: _kernel(mode, x, x, x))
        expr = traced.graph.outputs[0].expr
        call = canonical_call(expr)
        assert isinstance(expr, Apply)
        assert call is not None
        assert (possible_kinds(expr), read_operation(traced.graph.outputs[0])) == ((), None)
        texts.append(call.op)
    assert texts[0] == texts[1] != texts[2]

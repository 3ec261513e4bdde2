"""Every kind of op either has an ONNX form or a reason why it has none."""

from __future__ import annotations

from qtrace import ops
from qtrace.export._onnx_moves import MOVES
from qtrace.export._onnx_ops import EMITTERS, WITHOUT


def test_every_kind_has_an_emitter_or_a_reason() -> None:
    emitted = {*EMITTERS, *MOVES}
    assert sorted(set(ops.kinds()) - emitted - set(WITHOUT)) == []
    assert sorted(emitted & set(WITHOUT)) == []
    assert sorted((emitted | set(WITHOUT)) - set(ops.kinds())) == []


def test_no_kind_has_two_emitters() -> None:
    assert sorted(set(EMITTERS) & set(MOVES)) == []

"""Every kind of op either has an ONNX form or is refused with a reason."""

from __future__ import annotations

from pathlib import Path

import megengine.functional as F
import megengine.module as M
import pytest

import qtrace
from qtrace import ops
from qtrace.errors import ExportError
from qtrace.export.onnx.moves import MOVES
from qtrace.export.onnx.ops import EMITTERS, WITHOUT
from tests.nets import images, net


def test_every_kind_has_an_emitter_or_a_reason() -> None:
    assert sorted({*EMITTERS, *MOVES}) == list(ops.kinds())
    assert set(WITHOUT) < set(EMITTERS)
    assert all(len(reason) > 10 for reason in WITHOUT.values())


def test_no_kind_has_two_emitters() -> None:
    assert sorted(set(EMITTERS) & set(MOVES)) == []


def test_a_kind_without_a_form_is_refused_with_its_reason(tmp_path: Path) -> None:
    x = images(2, 4, 8, 8)
    module = net(lambda self, x: F.matinv(self.conv(x)), conv=M.Conv2d(4, 4, 1))
    prepared = qtrace.prepare(qtrace.trace(module, x, check=False))
    converted = qtrace.convert(qtrace.calibrate(prepared, [x], progress=False))
    with pytest.raises(ExportError, match=r"matinv_out: matinv has no ONNX form: ONNX has no op for it;"):
        qtrace.export(converted, tmp_path / "m.onnx")

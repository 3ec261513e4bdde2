"""Every kind of op either has an ONNX form or is refused with a reason."""

from __future__ import annotations

from pathlib import Path

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import onnxruntime as ort
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
    module = net(lambda self, x: F.svd(self.conv(x))[1], conv=M.Conv2d(4, 4, 1))
    prepared = qtrace.prepare(qtrace.trace(module, x, check=False))
    converted = qtrace.convert(qtrace.calibrate(prepared, [x], progress=False))
    with pytest.raises(ExportError, match=r"svd_out(_1)?: svd cannot become ONNX: ONNX has no op for it;"):
        qtrace.export(converted, tmp_path / "m.onnx")


def test_an_inverse_is_that_of_onnxruntime(tmp_path: Path) -> None:
    """NBNet projects onto the columns of V by (V^T V)^-1."""

    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        v = F.reshape(self.conv(x), (-1, 4, 64))
        product = F.matmul(v, F.transpose(v, (0, 2, 1))) + self.eye
        return F.matmul(F.matinv(product), v)

    x = images(2, 4, 8, 8)
    module = net(forward, conv=M.Conv2d(4, 4, 1), eye=mge.Tensor(np.eye(4, dtype=np.float32)))
    converted = qtrace.convert(
        qtrace.calibrate(qtrace.prepare(qtrace.trace(module, x, check=False)), [x], progress=False)
    )
    path = qtrace.export(converted, tmp_path / "m.onnx")
    assert qtrace.verify(path, converted, [x]).passed
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (got,) = session.run(None, {session.get_inputs()[0].name: x[:1]})  # the batch is open
    np.testing.assert_allclose(got, converted(mge.Tensor(x)).numpy()[:1], rtol=1e-3, atol=1e-4)

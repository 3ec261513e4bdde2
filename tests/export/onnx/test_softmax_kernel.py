"""onnxruntime's integer softmax wraps around at small output scales; such a softmax stays float."""

from __future__ import annotations

import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx
import onnxruntime as ort
import pytest

import qtrace
from tests.nets import net


def _optimized_ops(path, folder):
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return [node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node]


def _attention(gain, moved):
    """Attention over 5 tokens; with a small `gain` every token gets about a fifth."""

    def forward(self, x):
        scores = F.softmax(F.matmul(self.q(x), self.k(x), transpose_b=True) * gain, -1)
        if moved:
            return F.matmul(F.transpose(scores, (0, 2, 1)), self.v(x))
        return F.matmul(scores, self.v(x))

    return net(forward, q=M.Linear(8, 8), k=M.Linear(8, 8), v=M.Linear(8, 8))


@pytest.mark.quick(1)
@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize(("gain", "integer"), [(0.01, False), (3.0, True)])
def test_attention_that_is_nearly_uniform_is_right_when_deployed(gain, integer, moved, tmp_path):
    rng = np.random.default_rng(0)
    batches = [rng.normal(size=(2, 5, 8)).astype(np.float32) for _ in range(4)]
    prepared = qtrace.prepare(qtrace.trace(_attention(gain, moved), batches[0], check=False))
    qtrace.calibrate(prepared, batches[:2], progress=False)
    converted = qtrace.convert(prepared)
    path = qtrace.export(converted, tmp_path / "attention.onnx")
    report = qtrace.verify(path, converted, batches[2:])
    assert report.sqnr_db("deployed") > 30.0, report.summary()
    assert report.worst_lsb() <= 1
    assert ("QLinearSoftmax" in _optimized_ops(path, tmp_path)) is integer

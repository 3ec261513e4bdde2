"""Weights reach the file in ONNX's layout, whether quantized, kept in float, shared or computed."""

from __future__ import annotations

from pathlib import Path

import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest
from megengine import Parameter, Tensor

import qtrace


def _draw(*shape: int) -> np.ndarray:
    return np.random.RandomState(sum(shape)).randn(*shape).astype("float32")


class _TwoRanks(M.Module):
    """One linear layer that reads a matrix and a tensor of rank 3."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = M.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.reshape(-1, 6)).reshape(x.shape) + self.layer(x)


class _Layers(M.Module):
    """Every layer whose layout differs between MegEngine and ONNX."""

    def __init__(self, factor: float | None = None) -> None:
        super().__init__()
        self.factor = factor
        self.matrix = Parameter(_draw(6, 6))
        self.kernel = Parameter(_draw(2, 3, 2, 3, 3))
        self.bias = Parameter(_draw(1, 6, 1, 1))
        self.transposed = Parameter(_draw(2, 2, 3, 2, 2))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights = [self.matrix, self.kernel, self.transposed]
        if self.factor is not None:
            weights = [w * self.factor for w in weights]
        matrix, kernel, transposed = weights
        return (
            F.linear(x, matrix),
            F.conv2d(y, kernel, self.bias, groups=2),
            F.conv_transpose2d(y, transposed, groups=2),
        )


_LAYERS = ["linear", "conv2d", "conv_transpose2d"]
_FLOAT = [{"match": {"op": _LAYERS}, "quantize": False}]
_INPUTS = (_draw(2, 5, 6), _draw(2, 4, 6, 6))


@pytest.mark.parametrize(
    ("module", "inputs", "rules"),
    [
        (_TwoRanks(), _INPUTS[:1], []),
        (_TwoRanks(), _INPUTS[:1], [{"match": {"op": "linear"}, "quantize": False}]),
        (_Layers(), _INPUTS, []),
        (_Layers(), _INPUTS, _FLOAT),
        (_Layers(0.5), _INPUTS, _FLOAT),
    ],
    ids=["shared", "shared-float", "stored", "float", "computed-float"],
)
def test_runtime_computes_what_the_graph_does(
    tmp_path: Path, module: M.Module, inputs: tuple[np.ndarray, ...], rules: list[dict[str, object]]
) -> None:
    prepared = qtrace.prepare(qtrace.trace(module, *inputs), qtrace.QConfig(rules=rules))
    converted = qtrace.convert(qtrace.calibrate(prepared, [inputs], progress=False))
    path = qtrace.export(converted, tmp_path / "m.onnx")
    report = qtrace.verify(path, converted, [inputs])
    assert report.passed, report.summary()

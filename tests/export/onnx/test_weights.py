"""Weights reach the file in ONNX's layout, whether quantized, kept in float, shared or computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx
import pytest
from megengine import Parameter, Tensor

import qtrace
from qtrace.errors import ConfigError
from qtrace.graph.types import TracedModule
from tests.nets import calibrated_if_quantized


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


@pytest.mark.quick(2)
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
    prepared = qtrace.prepare(qtrace.trace(module, *inputs, check=False), qtrace.QConfig(rules=rules))
    converted = qtrace.convert(calibrated_if_quantized(prepared, [inputs]))
    path = qtrace.export(converted, tmp_path / "m.onnx")
    report = qtrace.verify(path, converted, [inputs])
    assert report.passed, report.summary()


def _channels(axes: tuple[int, ...], *shape: int) -> np.ndarray:
    """A weight whose channels differ by orders of magnitude: scales on a wrong axis would be seen."""
    sizes = [n if i in axes else 1 for i, n in enumerate(shape)]
    steps = np.arange(np.prod(sizes)).reshape(sizes) * 7 % 11 - 5
    return (_draw(*shape) * np.exp2(steps)).astype(np.float32)


_IMAGE = _draw(3, 4, 6, 6)
_COMPUTED = {
    "conv2d": (lambda x, w: F.conv2d(x, w, padding=1), _IMAGE, _channels((0,), 5, 4, 3, 3)),
    "conv2d-grouped": (lambda x, w: F.conv2d(x, w, groups=2), _IMAGE, _channels((0, 1), 2, 3, 2, 3, 3)),
    "conv_transpose2d": (F.conv_transpose2d, _IMAGE, _channels((1,), 4, 6, 2, 2)),
    "conv_transpose2d-square": (F.conv_transpose2d, _IMAGE, _channels((1,), 4, 4, 2, 2)),
    "conv_transpose2d-grouped": (
        lambda x, w: F.conv_transpose2d(x, w, groups=2),
        _IMAGE,
        _draw(2, 2, 3, 2, 2),
    ),
    "linear": (F.linear, _draw(3, 6), _channels((0,), 6, 6)),
    "linear-nd": (F.linear, _draw(3, 5, 6), _channels((0,), 6, 6)),
}


class _Computed(M.Module):
    """A layer whose weight is computed from a parameter and the input: no constant of the file."""

    def __init__(self, layer: Callable[[Tensor, Tensor], Tensor], value: np.ndarray) -> None:
        super().__init__()
        self.layer, self.value = layer, Parameter(value)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, self.value * F.maximum(F.mean(x), 0.5))


def _computed(kind: str, **config: object) -> tuple[TracedModule, np.ndarray]:
    layer, x, value = _COMPUTED[kind]
    traced = qtrace.trace(_Computed(layer, value), x, check=False)
    # Its product stays in float: the weight is quantized once, per channel.
    rules = [{"match": {"op": op}, "quantize": False} for op in ("mul", "mean", "maximum")]
    rules.append({"match": {"op": kind.split("-")[0]}, "quantize": True})
    prepared = qtrace.prepare(traced, qtrace.QConfig(rules=rules, **config))
    return qtrace.convert(qtrace.calibrate(prepared, [x], progress=False)), x


@pytest.mark.quick(3)
@pytest.mark.parametrize("kind", _COMPUTED)
def test_computed_weights_have_their_scales_on_the_axis_of_channels(kind: str, tmp_path: Path) -> None:
    converted, x = _computed(kind, weight={"narrow": False})
    path = qtrace.export(converted, tmp_path / "m.onnx")
    (node,) = (n for n in onnx.load(path).graph.node if n.output[0] == "mul_out_int")
    assert node.op_type == "QuantizeLinear"
    report = qtrace.verify(path, converted, [x], min_sqnr_db=50.0)
    assert report.passed, report.table()


def test_computed_weights_without_a_type_say_why_before_calibration() -> None:
    for weight in ({}, {"weight": {"bits": 4, "narrow": False}}):
        with pytest.raises(ConfigError, match=r"its weight is computed .* or give the weight all of 8 bits"):
            _computed("conv2d", **weight)

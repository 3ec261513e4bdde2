"""Activations of 16 bits in TFLite: symmetric integers, weights of 8 bits, biases of 64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace import QConfig
from qtrace.errors import ConfigError, ExportError
from qtrace.graph import functions
from qtrace.graph.types import TracedModule
from qtrace.targets.tflite.backend import BACKEND
from tests.nets import images, net
from tests.targets.tflite.files import constants, kinds, tensors

WIDE = {"bits": 16, "symmetric": True}


def _layers(self: Any, x: mge.Tensor) -> tuple[mge.Tensor, mge.Tensor]:
    y = F.relu(self.depth(self.conv(x)))
    y = F.max_pool2d(F.nn.pad(self.up(y), ((0, 0), (0, 0), (1, 1), (1, 1))), 2)
    y = F.avg_pool2d(F.vision.interpolate(F.avg_pool2d(y, 3, 1, 1), scale_factor=2), 2)
    z = F.concat([F.relu6(self.point(y)), F.clip(y, -0.5, 0.5)], 1)
    return self.fc(F.flatten(F.adaptive_avg_pool2d(z, 3), 1)), F.argmax(z, 1)


def _arithmetic(self: Any, x: mge.Tensor) -> mge.Tensor:
    a, b = self.a(x), self.b(x)
    total = (a + b) * (a - b) + (-a) / 3.0
    gate = F.mean(total, (2, 3), keepdims=True) * F.sum(b, 2, keepdims=True)
    pair = F.stack([total * gate, F.matmul(a, b) * 8.0], 1)  # of like ranges
    return self.last(pair.reshape(-1, 8, 8, 8))


def _functions(self: Any, x: mge.Tensor) -> mge.Tensor:
    y = self.conv(x)
    names = ("sigmoid", "tanh", "silu", "hswish", "hsigmoid")
    results = [getattr(F, n)(y) for n in names] + [F.leaky_relu(y, 0.1), F.prelu(y, self.slope)]
    results += [functions.hard_sigmoid(y), functions.mish(y)]
    total = results[0]
    for result in results[1:]:
        total = total + result
    return self.last(total)


def _row(self: Any, x: mge.Tensor) -> mge.Tensor:
    return self.b(F.relu(self.a(F.flatten(x, 2))))


NETS = {
    "row": net(_row, a=M.Conv1d(4, 6, 3, padding=1), b=M.Conv1d(6, 5, 3, stride=2)),
    "layers": net(
        _layers,
        conv=M.Conv2d(4, 6, 3, padding=1),
        depth=M.Conv2d(6, 6, 3, padding=1, groups=6),
        up=M.ConvTranspose2d(6, 4, 4, 2, 1),
        point=M.Conv2d(4, 5, 1, bias=False),
        fc=M.Linear(81, 7),
    ),
    "arithmetic": net(
        _arithmetic,
        a=M.Conv2d(4, 4, 3, padding=1),
        b=M.Conv2d(4, 4, 3, padding=1),
        last=M.Conv2d(8, 4, 1),
    ),
    "functions": net(
        _functions,
        conv=M.Conv2d(4, 6, 3, padding=1),
        last=M.Conv2d(6, 4, 1),
        slope=mge.Parameter(np.full(1, 0.2, np.float32)),
    ),
}


def _converted(module: M.Module, batches: list[np.ndarray], **config: Any) -> TracedModule:
    qconfig = QConfig(**{"backend": "tflite", "activation": WIDE, **config})
    prepared = qtrace.prepare(qtrace.trace(module, batches[0], check=False), qconfig)
    return qtrace.convert(qtrace.calibrate(prepared, batches, progress=False))


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", NETS)
def test_ops_are_one_step_off_at_most(name: str, tmp_path: Path) -> None:
    """LiteRT's kernels for 16 bits scale by numbers of 15 bits: a step of 65,536 is off here and there."""
    batches = [images(3, 4, 8, 8, seed=s) for s in range(3)]
    model = _converted(NETS[name], batches)
    path = qtrace.export(model, tmp_path / "m.tflite")
    report = qtrace.verify(path, model, batches, min_sqnr_db=70.0)
    assert report.passed, report.table()
    written = tensors(path).values()
    assert not [t.name for t in written if t.type == 9 and t.buffer == 0], "activations of 8 bits"
    stored = constants(path)
    assert {v.dtype for k, v in stored.items() if k.endswith("weight_int")} == {np.dtype(np.int8)}
    assert {v.dtype for k, v in stored.items() if k.endswith("bias_int")} == {np.dtype(np.int64)}


def test_the_nets_have_every_kind_of_the_target() -> None:
    kinds_used = set()
    for module in NETS.values():
        prepared = qtrace.prepare(
            qtrace.trace(module, images(1, 4, 8, 8), check=False), QConfig(backend="tflite")
        )
        notes = qtrace.explain(prepared).annotation.notes
        kinds_used |= {n.kind for n in notes if n.state in ("int", "fused")}
    assert BACKEND.ops - kinds_used == set(BACKEND.pieces)


@pytest.mark.quick(1)
@pytest.mark.parametrize("functions", ["native", "table"])
def test_functions_without_floats(functions: str, tmp_path: Path) -> None:
    batches = [images(2, 4, 8, 8, seed=s) for s in range(2)]
    model = _converted(NETS["functions"], batches)
    path = qtrace.export(model, tmp_path / "m.tflite", functions=functions)
    assert kinds(path).count("DEQUANTIZE") == 1
    assert ("LOGISTIC" in kinds(path)) == (functions == "native")
    off = {"native": 4, "table": 1}[functions]  # of 65,536 steps
    report = qtrace.verify(path, model, batches, max_lsb=off, min_equal=0.7, min_sqnr_db=60.0)
    assert report.passed, report.table()


def test_integers_at_both_ends(tmp_path: Path) -> None:
    batches = [images(2, 4, 8, 8)]
    model = _converted(NETS["functions"], batches)
    path = qtrace.export(model, tmp_path / "m.tflite", io="int8")
    assert kinds(path)[0] == "CONV_2D"
    assert qtrace.verify(path, model, batches, min_equal=0.9).passed


def test_a_kernel_has_one_width(tmp_path: Path) -> None:
    module = net(
        lambda self, x: self.b(F.relu(self.a(x))), a=M.Conv2d(4, 6, 3, padding=1), b=M.Conv2d(6, 4, 1)
    )
    rules = [{"match": {"name": "a"}, "activation": WIDE}]
    batches = [images(2, 4, 8, 8)]
    model = _converted(module, batches, activation=None, rules=rules)
    with pytest.raises(
        ExportError, match=r"relu_out reads int16 from x and gives int8.*--allow-float conv2d"
    ):
        qtrace.export(model, tmp_path / "m.tflite")
    assert not list(tmp_path.iterdir())
    path = qtrace.export(model, tmp_path / "m.tflite", allow_float="conv2d")
    assert " ".join(kinds(path)).startswith("QUANTIZE DEQUANTIZE CONV_2D RELU QUANTIZE")
    assert qtrace.verify(path, model, batches).passed


def test_a_zero_point_is_refused_before_calibration() -> None:
    traced = qtrace.trace(NETS["functions"], images(1, 4, 8, 8), check=False)
    with pytest.raises(ConfigError, match="affine schemes of 16 bits"):
        qtrace.prepare(traced, QConfig(backend="tflite", activation={"bits": 16, "symmetric": False}))

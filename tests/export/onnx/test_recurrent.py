"""Recurrent layers of MegEngine in ONNX files: the same values in onnxruntime, at every length and batch."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.module as M
import numpy as np
import onnx
import onnxruntime
import pytest

import qtrace
from qtrace.errors import ExportError, QtraceError
from qtrace.inspection.analysis import analyze
from tests.nets import net

RNG = np.random.default_rng(0)


def _array(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def _network(kind: type[M.Module], stated: bool, **options: Any) -> M.Module:
    def forward(self: M.Module, x: mge.Tensor, *states: mge.Tensor) -> Any:
        given = (tuple(states) if isinstance(self.layer, M.LSTM) else states[0]) if stated else None
        y, last = self.layer(self.first(x), given)
        return (y, *last) if isinstance(last, tuple) else (y, last)

    return net(forward, first=M.Linear(4, 4), layer=kind(4, 3, **options))


def _run(path: Path, arrays: list[np.ndarray]) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]
    return list(session.run(None, dict(zip(names, arrays, strict=True))))


@pytest.mark.quick(1)
@pytest.mark.parametrize("stated", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("kind", [M.LSTM, M.RNN])
def test_the_file_computes_what_the_layer_computes(
    kind: type[M.Module], layers: int, stated: bool, tmp_path: Path
) -> None:
    for number, (two, bias) in enumerate(itertools.product((False, True), repeat=2)):
        options: dict[str, Any] = {"num_layers": layers, "bidirectional": two, "bias": bias}
        if kind is M.RNN and bias:
            options["nonlinearity"] = "relu"
        batch_first = number % 2 == 0
        module = _network(kind, stated, batch_first=batch_first, **options)
        module.eval()
        x = _array(5, 2, 4)
        shape = (layers * (1 + two), 5 if batch_first else 2, 3)
        arrays = [x, *(_array(*shape) for _ in range(2 if kind is M.LSTM else 1) if stated)]
        tensors = [mge.Tensor(a) for a in arrays]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traced = qtrace.trace(module, *tensors, check=False)
        path = Path(qtrace.export(traced, tmp_path / f"{number}.onnx"))
        for result, expected in zip(_run(path, arrays), module(*tensors), strict=True):
            np.testing.assert_allclose(result, expected.numpy(), atol=1e-5)
        kinds = [node.op_type for node in onnx.load(path).graph.node]
        assert kinds.count("LSTM" if kind is M.LSTM else "RNN") == layers


def _crnn(x: np.ndarray) -> tuple[M.Module, np.ndarray]:
    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        steps = self.conv(x).mean(axis=2).transpose((2, 0, 1))
        return self.head(self.layer(steps)[0])

    module = net(
        forward, conv=M.Conv2d(3, 8, 3), layer=M.LSTM(8, 6, bidirectional=True), head=M.Linear(12, 5)
    )
    module.eval()
    return module, x


def test_a_quantized_network_is_verified_at_other_sizes(tmp_path: Path) -> None:
    module, x = _crnn(_array(2, 3, 8, 12))
    prepared = qtrace.prepare(qtrace.trace(module, x, check=False), {"placement": "everything"})
    qtrace.calibrate(prepared, [_array(4, 3, 8, 12) for _ in range(2)], progress=False)
    converted = qtrace.convert(prepared)
    path = Path(qtrace.export(converted, tmp_path / "int8.onnx"))
    more = _array(5, 3, 8, 12)
    assert qtrace.verify(path, converted, [more]).passed
    np.testing.assert_allclose(_run(path, [more])[0], converted(mge.Tensor(more)).numpy(), atol=0.2)
    row = next(line for line in str(qtrace.explain(prepared)).splitlines() if line.startswith("layer_out"))
    assert row.split()[:4] == ["layer_out", "lstm", "float", "float"]
    plain = mge.load(str(qtrace.export(converted, tmp_path / "plain", format="traced")))
    np.testing.assert_allclose(plain(mge.Tensor(more)).numpy(), module(mge.Tensor(more)).numpy(), atol=0.2)
    qtrace.save(prepared, tmp_path / "net.mge")
    again = qtrace.load(tmp_path / "net.mge")
    np.testing.assert_array_equal(again(mge.Tensor(more)).numpy(), prepared(mge.Tensor(more)).numpy())


def test_analyze_counts_macs_of_lstm() -> None:
    module, x = _crnn(_array(2, 3, 8, 12))
    report = analyze(qtrace.trace(module, x, check=False))
    assert not report.uncounted
    (macs,) = (op.macs for op in report.ops if op.kind == "lstm")
    assert macs == 10 * 2 * 2 * 4 * 6 * (8 + 6)  # steps, samples, directions, gates, hidden, values


@pytest.mark.parametrize("name", ["net.tflite", "net.param"])
def test_a_format_without_it_refuses_in_a_sentence(name: str, tmp_path: Path) -> None:
    module = net(lambda self, x: self.layer(x)[0], layer=M.LSTM(4, 6))
    with pytest.raises(ExportError, match="layer_out"):
        qtrace.export(qtrace.trace(module, _array(5, 2, 4), check=False), tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_projected_state_is_refused(tmp_path: Path) -> None:
    module = net(lambda self, x: self.layer(x)[0], layer=M.LSTM(4, 6, proj_size=3))
    with pytest.raises(QtraceError, match="projected hidden state"):
        qtrace.export(qtrace.trace(module, _array(5, 2, 4), check=False), tmp_path / "net.onnx")

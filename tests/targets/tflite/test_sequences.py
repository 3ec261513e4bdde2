"""Convolutions of sequences and volumes, and rankings, in LiteRT as in the graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest
from ai_edge_litert.interpreter import Interpreter

import qtrace
from qtrace.errors import ExportError
from tests.each import each_of
from tests.nets import net, randomize
from tests.targets.tflite.files import kinds

SEQUENCE, VOLUME, SCORES = (2, 6, 20), (2, 3, 6, 8, 7), (2, 30)


def _exported(module: M.Module, shape: tuple[int, ...], folder: Path) -> tuple[Any, Path, Any]:
    batches = [np.random.default_rng(n).normal(size=shape).astype(np.float32) for n in range(2)]
    config = {"backend": "tflite"}
    prepared = qtrace.prepare(qtrace.trace(randomize(module, 0), batches[0], check=False), config)
    converted = qtrace.convert(qtrace.calibrate(prepared, batches, progress=False))
    path = qtrace.export(converted, folder / "m.tflite")
    return converted, path, qtrace.verify(path, converted, batches)


def _stack(self: Any, x: Any) -> Any:
    return F.flatten(self.c(F.relu(self.b(F.relu6(self.a(x))))), 1)


SEQUENCES: dict[str, tuple[M.Module, str]] = {
    "same": (net(lambda self, x: self.a(x), a=M.Conv1d(6, 8, 3, padding=1)), "RESHAPE CONV_2D"),
    "valid": (net(lambda self, x: self.a(x), a=M.Conv1d(6, 8, 5)), "RESHAPE CONV_2D"),
    "strided": (net(lambda self, x: self.a(x), a=M.Conv1d(6, 8, 3, 2, 1)), "RESHAPE PAD CONV_2D"),
    "dilated": (net(lambda self, x: self.a(x), a=M.Conv1d(6, 8, 3, 1, 2, 2, bias=False)), "RESHAPE CONV_2D"),
    "three": (
        net(_stack, a=M.Conv1d(6, 8, 3, padding=1), b=M.Conv1d(8, 8, 3, 2), c=M.Conv1d(8, 4, 1)),
        "RESHAPE CONV_2D",
    ),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_conv1d_is_a_convolution_of_one_row_on_integers(name: str, tmp_path: Path) -> None:
    module, operators = SEQUENCES[name]
    converted, path, report = _exported(module, SEQUENCE, tmp_path)
    assert report.passed, report.table()
    assert report.worst_lsb() <= 1
    states = [note.state for note in qtrace.explain(converted).annotation.notes if note.kind == "conv1d"]
    assert states
    assert set(states) <= {"int", "fused"}
    assert set(operators.split()) <= set(kinds(path))


def test_conv1d_in_float(tmp_path: Path) -> None:
    module, x = randomize(SEQUENCES["three"][0], 0), np.ones(SEQUENCE, np.float32)
    traced = qtrace.trace(module, x, check=False)
    path = qtrace.export(traced, tmp_path / "m.tflite")
    assert qtrace.verify(path, traced, [x]).passed


VOLUMES = {
    "same": M.Conv3d(3, 4, 3, padding=1),
    "valid": M.Conv3d(3, 4, (1, 3, 2)),
    "strided": M.Conv3d(3, 4, 3, 2, 1),
    "dilated": M.Conv3d(3, 4, 2, 1, (1, 0, 2), (2, 1, 2), bias=False),
}


@pytest.mark.parametrize("name", VOLUMES)
def test_conv3d_is_in_float(name: str, tmp_path: Path) -> None:
    module = net(
        lambda self, x: self.b(F.flatten(F.relu(self.a(x)), 3)), a=VOLUMES[name], b=M.Conv2d(4, 5, 1)
    )
    _, path, report = _exported(module, VOLUME, tmp_path)
    assert report.passed, report.table()
    assert "CONV_3D" in kinds(path)


def test_grouped_conv3d_is_refused(tmp_path: Path) -> None:
    module = net(
        lambda self, x: self.b(F.flatten(self.a(x), 3)), a=M.Conv3d(3, 3, 1, groups=3), b=M.Conv2d(3, 5, 1)
    )
    with pytest.raises(ExportError, match="a_out: a grouped convolution of volumes"):
        _exported(module, VOLUME, tmp_path)
    assert not list(tmp_path.iterdir())


def _positions(self: Any, x: Any) -> Any:
    values, places = F.topk(self.fc(x), 5, descending=True)
    return values, places


def _taken(self: Any, x: Any) -> Any:
    """Rows by computed positions, as detectors take those of the best scores, and single values."""
    rows = F.transpose(self.fc(x).reshape(x.shape[0], 3, 4), (0, 2, 1))
    _, places = F.topk(F.max(rows, 2), 2, descending=True)
    wide = F.broadcast_to(F.expand_dims(places, 2), (x.shape[0], 2, 3))
    return self.out(F.flatten(F.gather(rows, 1, wide), 1)), F.gather(self.fc(x), 1, places)


RANKINGS = {
    "rows of the best": _taken,
    "topk": _positions,
    "topk, smallest": lambda self, x: F.topk(self.fc(x), 4),
    "topk of more": lambda self, x: F.topk(self.fc(x), 99, descending=True),
    "kth": lambda self, x: F.topk(self.fc(x), 3, descending=True, kth_only=True)[0],
    "sort": lambda self, x: F.sort(self.fc(x)),
    "sort, descending": lambda self, x: F.sort(self.fc(x), descending=True),
    "argsort": lambda self, x: F.argsort(self.fc(x)),
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", RANKINGS)
def test_rankings(name: str, tmp_path: Path) -> None:
    module = net(RANKINGS[name], fc=M.Linear(30, 12), out=M.Linear(6, 2))
    _, path, report = _exported(module, SCORES, tmp_path)
    assert report.passed, report.table()
    assert "TOPK_V2" in kinds(path)


NORMS: dict[str, Any] = {
    "two": lambda self, x: F.norm(self.fc(x), axis=1),
    "one, kept": lambda self, x: F.norm(self.fc(x), ord=1, axis=1, keepdims=True),
    "an image": lambda self, x: F.norm(F.transpose(self.fc(x).reshape(2, 3, 2, 2), (0, 2, 3, 1)), axis=3),
}


@pytest.mark.parametrize("name", NORMS)
def test_vector_norms(name: str, tmp_path: Path) -> None:
    _, _, report = _exported(net(NORMS[name], fc=M.Linear(30, 12)), SCORES, tmp_path)
    assert report.passed, report.table()


def test_other_norms_are_refused(tmp_path: Path) -> None:
    module = net(lambda self, x: F.norm(self.fc(x), ord=3, axis=1), fc=M.Linear(30, 12))
    with pytest.raises(ExportError, match="norm_out: a norm of order 3"):
        _exported(module, SCORES, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flat", [False, True])
def test_rows_of_a_table_at_other_batches(flat: bool, tmp_path: Path) -> None:
    def forward(self: Any, ids: Any) -> Any:
        rows = self.rows[ids.reshape(-1)].reshape(ids.shape[0], 7, 8) if flat else self.rows[ids]
        return self.fc(F.mean(rows, 1))

    table = mge.Parameter(np.random.default_rng(0).normal(size=(20, 8)).astype(np.float32))
    module = net(forward, rows=table, fc=M.Linear(8, 4))
    ids = [
        np.random.default_rng(n).integers(0, 20, (count, 7)).astype(np.int32)
        for n, count in enumerate((3, 5))
    ]
    prepared = qtrace.prepare(qtrace.trace(module, ids[0], check=False), {"backend": "tflite"})
    converted = qtrace.convert(qtrace.calibrate(prepared, ids, progress=False))
    path = qtrace.export(converted, tmp_path / "m.tflite")
    assert "GATHER" in kinds(path)
    report = qtrace.verify(path, converted, ids)
    assert report.passed, report.table()


def _turned(x: Any, *order: int) -> Any:
    return F.transpose(x, order)


AXES_OF_SAMPLES: dict[str, Any] = {
    "rows": lambda x: _turned(F.relu(_turned(x, 0, 2, 1).reshape(-1, 6)).reshape(-1, 10, 6), 0, 2, 1),
    "rows in order": lambda x: F.relu(x.reshape(-1, 10)).reshape(-1, 6, 10),
    "second axis": lambda x: F.relu(_turned(x, 1, 0, 2)).reshape(6, -1, 2, 5).transpose(1, 0, 2, 3) + 1.0,
    "last axis": lambda x: F.relu(_turned(x, 1, 2, 0)).reshape(3, 20, -1).transpose(2, 0, 1) * 2.0,
    "largest": lambda x: F.topk(_turned(x, 0, 2, 1).reshape(-1, 6), 3, descending=True)[0].reshape(-1, 10, 3),
    "heads": lambda x: (
        F.relu(_turned(x.reshape(-1, 6, 2, 5), 2, 0, 1, 3).reshape(-1, 6, 5))
        .reshape(2, -1, 6, 5)
        .transpose(1, 0, 2, 3)
    ),
}


@each_of("traced", [1, 3])
@each_of("case", AXES_OF_SAMPLES)
def test_samples_stay_apart_on_any_axis_at_other_batches(case: str, traced: int, tmp_path: Path) -> None:
    function = AXES_OF_SAMPLES[case]
    module = net(lambda self, x: function(x))
    x, y = (np.random.default_rng(n).normal(size=(n, 6, 10)).astype(np.float32) for n in (traced, 4))
    path = qtrace.export(qtrace.trace(module, x, check=False), tmp_path / "m.tflite")
    interpreter = Interpreter(str(path))
    (source,), (target,) = interpreter.get_input_details(), interpreter.get_output_details()
    assert source["shape_signature"][0] == -1
    interpreter.resize_tensor_input(source["index"], y.shape)
    interpreter.allocate_tensors()
    interpreter.set_tensor(source["index"], y)
    interpreter.invoke()
    result, expected = interpreter.get_tensor(target["index"]), module(mge.Tensor(y)).numpy()
    assert result.shape == expected.shape
    np.testing.assert_allclose(result, expected, rtol=1e-5)

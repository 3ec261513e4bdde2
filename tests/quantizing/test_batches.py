"""One file whatever batches the data come in, and where batches have to stay as they are."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.config.recipe import config_or_default
from qtrace.data.base import batch_length
from qtrace.errors import CalibrationError, DataError
from qtrace.preparation.model import fake_quants
from qtrace.quantizing import call_data
from qtrace.quantizing.call_data import CallData, DataOpener, usual_size
from qtrace.quantizing.options import DataReading
from qtrace.quantizing.reporting import LogReporter
from qtrace.quantizing.sources import read_network
from tests.nets import images, net

DATA = images(44, 3, 16, 16)
RECIPE = {"placement": "balanced", "ptq": ["gptq"]}


def _module() -> M.Module:
    """Gains enough by integers for a choice, which `gptq` is fitted for."""
    np.random.seed(3)
    layers = {name: M.Conv2d(n, 32, 3, padding=1) for name, n in (("a", 3), ("b", 32), ("c", 32))}
    for seed, layer in enumerate(layers.values()):
        shape = layer.weight.numpy().shape
        layer.weight[:] = np.random.default_rng(seed).normal(0, 0.1, shape).astype(np.float32)

    def forward(self: Any, x: Any) -> Any:
        return self.c(F.relu(self.b(F.relu(self.a(x))))).mean(axis=(2, 3))

    return net(forward, **layers)


def _list(size: int) -> list[np.ndarray]:
    return [DATA[i : i + size] for i in range(0, len(DATA), size)]


def test_one_hash_whatever_the_batches(tmp_path: Path) -> None:
    """Batches of 1, 6 and 8 gave three files: by last bits, rows of `gptq`, and what was held back."""
    np.savez(tmp_path / "x.npz", x=DATA)
    forms: list[tuple[Any, dict[str, int]]] = [(_list(1), {}), (tmp_path / "x.npz", {"batch_size": 6})]
    forms += [(DATA, {"batch_size": 11, "max_batches": 4})]
    hashes, lines = set(), set()
    for data, reading in forms:
        out = tmp_path / "out.onnx"
        result = qtrace.quantize(
            _module(), data, out, recipe=RECIPE, measure=False, progress=False, **reading
        )
        assert result.verdict is not None
        assert any(fake_quants(result.prepared))
        lines.add(result.verdict.line())
        hashes.add(hashlib.sha256(out.read_bytes()).hexdigest())
        out.unlink()
    assert len(hashes) == len(lines) == 1
    assert "held-back samples" in lines.pop()


@pytest.mark.parametrize(
    "form", [DATA[:24], [DATA[i : i + 4] for i in range(0, 24, 4)]], ids=["array", "list"]
)
def test_errors_name_the_samples_of_the_data(form: Any, tmp_path: Path) -> None:
    """Batches are cut anew, so that their numbers say nothing to the user."""
    data = form.copy() if isinstance(form, np.ndarray) else [batch.copy() for batch in form]
    (data if isinstance(data, np.ndarray) else data[3])[
        13 if isinstance(data, np.ndarray) else 1, 0, 2, 3
    ] = np.nan
    with pytest.raises(
        CalibrationError, match=r"batch 1 \(from sample 8 of the data\) holds NaN.*\(sample 13\)"
    ):
        qtrace.quantize(_module(), data, tmp_path / "out.onnx", measure=False, progress=False)


def _open(module: Any, data: Any, **reading: Any) -> tuple[Any, CallData]:
    source = qtrace.trace(module, *module.example, check=False) if hasattr(module, "example") else module
    opener = DataOpener(source, data, None, DataReading(**reading), config_or_default(None), LogReporter())
    return opener.open(lambda batches: read_network(source, batches, None, ()))


def _lengths(opened: CallData) -> list[int]:
    return [batch_length(batch) for batch in opened.calibration]


@pytest.mark.parametrize("axis", ["time", "tokens", "mean", "rows"])
def test_batches_stay_where_their_first_axis_is_none_of_samples(axis: str) -> None:
    def forward(self: Any, x: Any) -> Any:
        if axis == "time":
            return self.lstm(F.expand_dims(x, 1))[0]
        if axis == "tokens":
            return F.matmul(F.softmax(F.matmul(x, x, transpose_b=True)), x)
        return x - x.mean(axis=0) if axis == "mean" else F.relu(x).mean(axis=0)

    module = net(forward, lstm=M.LSTM(4, 5))
    batches = [images(1, n, 4, seed=n)[0] for n in (20, 20, 12, 20, 20)]
    assert _lengths(_open(module, batches)[1]) == [20, 20, 12, 20]


@pytest.mark.parametrize("size", [5, 12])
@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("form", ["list", "array"])
def test_a_network_of_one_batch_gets_it(size: int, traced: bool, form: str) -> None:
    module = net(lambda self, x: self.a(x).reshape(size, -1), a=M.Conv2d(3, 4, 3))
    if traced:
        module.example = (DATA[:size],)
    data, reading = (_list(size), {}) if form == "list" else (DATA, {"batch_size": size})
    _, opened = _open(module, data, **reading)
    assert set(_lengths(opened)) == {size}


@pytest.mark.parametrize("size", [5, 12])
def test_a_setting_does_not_open_a_batch(size: int) -> None:
    """The samples of the verdict did not fit the network, which was not found to be of one batch."""
    module = net(lambda self, x, rate: self.a(x).reshape(size, -1) * rate, a=M.Conv2d(3, 4, 3))
    traced, opened = _open(module, [{"x": batch, "rate": 2.0} for batch in _list(size)])
    judged = map(batch_length, opened.evaluation.read(traced))
    assert {*_lengths(opened), *judged} == {size}


def test_a_setting_stays_whole_where_samples_are_cut() -> None:
    module = net(lambda self, x, rate: (self.a(x) * rate).mean(axis=0), a=M.Conv2d(3, 4, 3))
    traced, opened = _open(module, [{"x": batch, "rate": 2.0} for batch in _list(12)])
    (judged,) = opened.evaluation.read(traced)
    assert isinstance(judged, dict)
    assert (len(judged["x"]), judged["rate"]) == (8, 2.0)


def test_a_limit_lets_as_many_whole_batches_through_in_each_form() -> None:
    module = net(lambda self, x: self.a(x).reshape(4, 784), a=M.Conv2d(3, 4, 3))
    module.example = (DATA[:4],)
    forms: list[tuple[Any, dict[str, int]]] = [(_list(5), {}), (DATA, {"batch_size": 5})]
    assert [_lengths(_open(module, data, max_batches=3, **own)[1]) for data, own in forms] == [[4] * 3] * 2


@pytest.mark.parametrize("only", [True, False])
def test_large_samples_of_a_list_run_one_by_one(only: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_data, "usual_size", lambda batch: 1)
    module = net(lambda self, x: self.a(x).reshape(1 if only else x.shape[0], 784), a=M.Conv2d(3, 4, 3))
    module.example = (DATA[:1],)
    assert _lengths(_open(module, _list(4))[1]) == [1] * 36


def test_inputs_without_a_common_first_axis_stay() -> None:
    module = net(lambda self, x, edges: F.matmul(edges, x))
    batches: Sequence[Any] = [(images(1, 7, 4)[0], images(1, 5, 7)[0]) for _ in range(5)]
    assert _lengths(_open(module, batches)[1]) == [7, 7, 7]


@pytest.mark.parametrize("sized", [True, False])
def test_nothing_is_read_after_the_limit_of_batches(sized: bool) -> None:
    """It may be no batch: eight samples take three batches of the list."""

    def read() -> Any:
        yield from _list(3)[:2]
        raise AssertionError("a third batch was read")

    limited: Any = _Broken(_list(3)) if sized else read
    module = net(lambda self, x: self.a(x), a=M.Conv2d(3, 4, 3))
    _, opened = _open(module, limited, max_batches=2)
    assert _lengths(opened) == [6]
    with pytest.raises(DataError, match="max_batches must be at least 1, not -1"):
        _open(module, DATA, max_batches=-1)


class _Broken(list[Any]):
    """Batches of which only two can be read."""

    def __iter__(self) -> Any:
        yield from self[:2]
        raise AssertionError("a third batch was read")

    def __len__(self) -> int:
        return 2


def test_few_passes_read_the_data(tmp_path: Path) -> None:
    """The samples of the verdict were read six times, each after all others of a list."""
    passes = []

    class Data(list[Any]):
        def __iter__(self) -> Any:
            for number, batch in enumerate(super().__iter__()):
                passes.extend([number] * (number == len(self) - 1))
                yield batch

    qtrace.quantize(_module(), Data(_list(6)), tmp_path / "out.onnx", measure=False, progress=False)
    assert len(passes) <= 3  # their number, the verdict, and the file on more samples; ranges need fewer


def test_large_samples_run_in_smaller_batches() -> None:
    sizes = [usual_size((np.broadcast_to(np.float32(0), (6, 3, n, n)),)) for n in (32, 224, 640, 1760)]
    assert sizes == [8, 8, 3, 1]

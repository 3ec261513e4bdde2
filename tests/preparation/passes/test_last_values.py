"""Results with columns of unlike ranges that reach the outputs through other ops than layers."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.comparing.sums import sqnr_db
from qtrace.preparation.model import QuantizedModel
from qtrace.preparation.prepare import plan
from tests.each import each_of
from tests.nets import images, randomize

X = images(4, 3, 12, 12, seed=1)
Outputs = mge.Tensor | tuple[mge.Tensor, ...]


class _Net(M.Module):
    """Two convs; channels 0 to 3 of the second have values near 64, channels 4 to 11 near 0.02.

    Args:
        tail: computes the outputs from the second conv's result.
    """

    def __init__(self, tail: Callable[[mge.Tensor], Outputs]) -> None:
        super().__init__()
        self.a, self.b = M.Conv2d(3, 8, 3, padding=1), M.Conv2d(8, 12, 3, padding=1)
        self.tail = tail
        randomize(self, 3)
        size = np.where(np.arange(12) < 4, 64.0, 0.02).astype("float32")
        self.b.weight[...] = self.b.weight * mge.tensor(size.reshape(12, 1, 1, 1))
        self.b.bias[...] = self.b.bias * mge.tensor(size.reshape(1, 12, 1, 1))

    def forward(self, x: mge.Tensor) -> Outputs:
        return self.tail(self.b(F.relu(self.a(x))))


def _anchors(y: mge.Tensor) -> Outputs:
    y = F.flatten(y, 2).transpose(0, 2, 1)
    return F.exp(y[..., :4] / 64), F.sigmoid(y[..., 4:] * 50)


TAILS = {
    "one slice": lambda y: (F.mean(y, axis=(1, 2, 3)), y[:, 4:] * 50),
    "mean": lambda y: F.mean(y, axis=(2, 3)),
    "reshape and slice": lambda y: F.sigmoid(y.reshape(4, 3, 4, 12, 12)[:, 1] * 50),
    "gather": lambda y: F.tanh(F.transpose(y, (0, 2, 3, 1))[..., 4:8] * 50),
    "channels last": _anchors,
    "pooling": lambda y: F.flatten(F.avg_pool2d(y, 4), 2),
    "global pooling": lambda y: F.adaptive_avg_pool2d(y, 1),
    "sum": lambda y: y + y * 0.5,
    "residual": lambda y: F.relu(y) + y,
    "functions": lambda y: F.leaky_relu(y) * 1.5,
}


def _groups_db(net: M.Module, config: dict[str, Any] | None) -> list[float]:
    """Returns the SQNR of channels 0 to 3 and 4 to 11, or of each output where these are several."""
    traced = qtrace.trace(net, mge.tensor(X), check=False)
    prepared = qtrace.prepare(traced, config, samples=[X])
    qtrace.calibrate(prepared, [X])
    exact, rounded = traced(mge.tensor(X)), prepared(mge.tensor(X))
    if isinstance(exact, tuple):
        pairs = list(zip(exact, rounded, strict=True))
    elif exact.shape[1] == 12:
        pairs = [(exact[:, :4], rounded[:, :4]), (exact[:, 4:], rounded[:, 4:])]
    else:
        pairs = [(exact, rounded)]
    return [sqnr_db(a.numpy(), b.numpy()) for a, b in pairs]


def _packed(y: mge.Tensor) -> Outputs:
    return F.concat([F.exp(y[:, :4] / 64) * 8, F.sigmoid(y[:, 4:] * 50 - 3)], axis=1)


@pytest.mark.parametrize("backend", ["onnxruntime", "tensorrt", "tflite"])
def test_the_rules_of_the_guide_keep_the_end_of_a_detector_in_float(backend: str) -> None:
    page = " ".join((Path(__file__).parents[3] / "docs/guides/training.md").read_text().split())
    match = re.search(r"```python rules = (\[.*?\]) ```", page)
    assert match is not None
    rules = ast.literal_eval(match.group(1))
    config = {"backend": backend, "rules": rules[:1] if backend == "tflite" else rules}
    assert min(_groups_db(_Net(_packed), config)) > 40
    prepared = qtrace.prepare(qtrace.trace(_Net(_packed), mge.tensor(X), check=False), config, samples=[X])
    states = {note.op: note.state for note in QuantizedModel(prepared).annotation.notes}
    assert {states[op] for op in ("F.exp", "F.sigmoid", "F.concat")} == {"float"}


def test_a_mapping_without_placement_rounds_everything_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    traced = qtrace.trace(_Net(_packed), mge.tensor(X), check=False)
    with caplog.at_level("INFO", "qtrace"):
        qtrace.prepare(traced, {"activation": {"signed": False}})
        assert "the config leaves placement out, so every op that onnxruntime can is rounded" in caplog.text
        caplog.clear()
        qtrace.prepare(traced, {"placement": "balanced"})
        qtrace.prepare(traced, "backend/onnxruntime")
        qtrace.prepare(traced, {"backend": "generic"})
    assert "leaves placement out" not in caplog.text


@pytest.mark.parametrize("backend", [None, "onnxruntime", "tflite", "tensorrt"])
@pytest.mark.parametrize("name", TAILS)
def test_unlike_columns_of_an_inner_result_are_not_lost(name: str, backend: str | None) -> None:
    decibels = _groups_db(_Net(TAILS[name]), backend and {"backend": backend})
    assert min(decibels) > 25, decibels


class _Sized(M.Module):
    """A conv and a layer with a last channel of a size of its own, then a tail.

    Args:
        size: the size of the last channel; the others have `others`.
        others: the size of the other channels.
        columns: the number of channels.
        bias: the bias of the last channel.
        tail: computes the outputs.
    """

    def __init__(
        self,
        size: float,
        others: float = 1.0,
        bias: float = 0.0,
        columns: int = 4,
        tail: Callable[..., Outputs] | None = None,
    ) -> None:
        super().__init__()
        self.a, self.b = M.Conv2d(3, 8, 3, padding=1), M.Conv2d(8, columns, 1)
        self.tail = tail
        randomize(self, 3)
        sizes = np.full((columns, 1, 1, 1), others, np.float32)
        biases = np.zeros((1, columns, 1, 1), np.float32)
        sizes[-1], biases[0, -1] = size, bias
        self.b.weight[...] = self.b.weight * mge.tensor(sizes)
        self.b.bias[...] = mge.tensor(biases)

    def forward(self, x: mge.Tensor) -> Outputs:
        y = self.b(F.relu(self.a(x)))
        return y if self.tail is None else self.tail(y)


def _is_rounded(module: M.Module, backend: str = "onnxruntime") -> bool:
    """Returns whether the result of the second conv has a site."""
    traced = qtrace.trace(module, mge.tensor(X), check=False)
    annotation = plan(traced, {"backend": backend}, samples=[X])
    return any(site.name.startswith(("b_out", "relu_out_1")) for site in annotation.sites)


NOTHING = {
    "zero": {"size": 0.0},
    "of weight decay": {"size": 1e-9, "columns": 12},
    "of weight decay, small beside large": {"size": 1e-6, "others": 300.0, "columns": 12},
    "denormal": {"size": 1e-40},
    "constant": {"size": 0.0, "bias": 0.002},
    "constant but for its last place": {"size": 1e-11, "bias": 0.002},
    "behind relu": {"size": 1e-9, "columns": 12, "tail": F.relu},
    "behind a mean": {"size": 1e-9, "columns": 12, "tail": lambda y: F.mean(y, axis=(2, 3))},
    "transposed and scaled": {"size": 1e-9, "columns": 12, "tail": lambda y: y.transpose(0, 2, 3, 1) * 2.0},
}
SOMETHING = {
    "a unit of its own": {"size": 1e-6, "others": 1e5},
    "one of a few": {"size": 1e-9},
    "scores beside boxes": {"size": 1e-3, "others": 300.0},
    "small scores beside boxes": {"size": 1e-4, "others": 300.0},
    "0.001": {"size": 1e-3},
    "0.000001": {"size": 1e-6},
    "varies around a small mean": {"size": 1e-4, "bias": 1e-3},
    "dead size, scaled up": {"size": 1e-9, "tail": lambda y: (y[:, :3], y[:, 3:] * 1e9)},
    "dead size, given a scale for each column": {
        "size": 1e-9,
        "tail": lambda y: y * mge.tensor(np.array([1, 1, 1, 1e6], np.float32).reshape(1, 4, 1, 1)),
    },
}


@each_of("backend", ["onnxruntime", "tflite"])
@each_of("name", NOTHING)
def test_a_column_that_tells_nothing_keeps_no_output_in_float(name: str, backend: str) -> None:
    assert _is_rounded(_Sized(**NOTHING[name]), backend)


@each_of("name", SOMETHING)
def test_a_small_column_that_tells_something_stays_in_float(name: str) -> None:
    assert not _is_rounded(_Sized(**SOMETHING[name]))

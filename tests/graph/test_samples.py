"""A batch beside its samples: MegEngine's wrong kernels and ops that combine samples are named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.errors import GraphError
from qtrace.graph import check_samples
from qtrace.graph.tracing import session
from qtrace.graph.types import TracedModule
from tests.each import each_of
from tests.nets import images, net
from tests.zoo.catalog import CNN
from tests.zoo.detectors.entries import DETECTORS
from tests.zoo.detectors.yolo import mesh
from tests.zoo.quick import parameters
from tests.zoo.transformers.entries import TRANSFORMERS

X = images(4, 3, 8, 8)
# The networks of the zoo whose results for an image depend on the other images of the batch.
COMBINING = {
    "clip": ("shape", "F.matmul"),  # every image beside every text
    "freeanchor:train": ("samples", "Tensor.mean"),  # a loss
    "faster_rcnn:box": ("samples", "F.roi_align"),  # the rows of its second input name images by number
}


def _traced(forward: Callable[..., Any], x: np.ndarray = X, **attributes: Any) -> TracedModule:
    return qtrace.trace(net(forward, **attributes), x, check=False)


def decode(self: Any, x: Any) -> Any:
    """Decodes two levels as YOLOX does: two numbers of each row are a distance from the cell."""
    levels, grids = [], []
    for y in (self.conv(x), self.conv(F.avg_pool2d(x, 2))):
        levels.append(F.transpose(F.flatten(y, start_axis=2), (0, 2, 1)))
        grids.append(mesh(*y.shape[-2:]).reshape(1, -1, 2))
    rows, grid = F.concat(levels, axis=1), F.concat(grids, axis=1)
    centre = (rows[..., :2] + grid) * 8
    return F.concat([centre, F.exp(rows[..., 2:4]) * 8, F.sigmoid(rows[..., 4:])], axis=-1)


@pytest.fixture
def _without_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "find_copies", lambda traced: [])


@pytest.mark.usefixtures("_without_copies")
@each_of("batch", [2, 3, 8])
def test_the_fault_of_slices_is_found_in_a_decode(batch: int) -> None:
    mge.random.seed(0)
    conv = M.Conv2d(3, 7, 3, padding=1)
    x = images(batch, 3, 8, 8)
    report = check_samples(_traced(decode, x, conv=conv), x)
    assert not report.passed
    assert report.difference is not None
    assert report.difference.node == "add_out"
    assert report.difference.kind == "view"
    line = decode.__code__.co_firstlineno + 7
    assert report.difference.line == f"tests/graph/test_samples.py:{line}"
    assert f"first, add_out (Tensor.__add__, tests/graph/test_samples.py:{line}) is off by" in str(report)
    assert "F.nn.pad(x, ((0, 0),) * x.ndim) behind the view" in str(report)


@pytest.mark.usefixtures("_without_copies")
@pytest.mark.parametrize("batch", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_fault_is_found_in_a_whole_detector(batch: int) -> None:
    (entry,) = (e for e in DETECTORS if e.name == "fcos:infer")
    x = images(batch, *entry.example()[0].shape[1:])
    difference = check_samples(qtrace.trace(entry.build(), x, check=False), x).difference
    assert difference is not None
    assert difference.kind == "view"
    assert (difference.op, difference.line) == ("Tensor.__sub__", "tests/zoo/detectors/anchors.py:74")


def test_with_its_copies_the_decode_passes() -> None:
    report = check_samples(_traced(decode, conv=M.Conv2d(3, 7, 3, padding=1)), X)
    assert report.passed
    assert report.to_dict() == {"passed": True, "samples": 4, "outputs": [], "difference": None}
    assert str(report) == "A batch of 4 gives what its samples give one by one."
    with pytest.raises(FrozenInstanceError):
        report.samples = 5


def merged(self: Any, x: Any) -> Any:
    n, c, h, w = x.shape
    y = F.transpose(x, (1, 0, 2, 3)).reshape(1, c * n, h, w)  # as where convolutions differ by sample
    y = F.transpose(F.avg_pool2d(y, 2).reshape(c, n, -1), (1, 0, 2))
    return F.softmax(y, axis=2), F.flatten(y, 0, 1)


def joined_and_parted(self: Any, x: Any) -> Any:
    total = F.sum(x, axis=0, keepdims=True)  # mixes all samples
    return (x + total) - total, F.concat([x, x[:, :1]], axis=1)


@pytest.mark.parametrize("forward", [merged, joined_and_parted])
def test_samples_may_be_joined_as_long_as_they_part_again(forward: Callable[..., Any]) -> None:
    assert check_samples(_traced(forward), X).passed


def centred(self: Any, x: Any) -> Any:
    y = self.conv(x) * 2
    return F.relu(y), F.relu(y - F.mean(y, axis=0, keepdims=True)) + y


def neighbours(self: Any, x: Any) -> Any:
    return x + F.concat([x[1:], x[:1]], axis=0)


def by_count(self: Any, x: Any) -> Any:
    return F.sum(x, axis=(1, 2, 3)) / x.shape[0]


def noisy(self: Any, x: Any) -> Any:
    return x + mge.random.normal(size=(1, 3, 8, 8))


def squeezed(self: Any, x: Any) -> Any:
    return F.squeeze(F.avg_pool2d(x, 8))


def fixed(self: Any, x: Any) -> Any:
    return F.relu(x.reshape(4, 3, 64))


@each_of(
    ("forward", "kind", "op", "problem"),
    [
        (centred, "samples", "F.mean", "combines samples, or its kernel is wrong for batches"),
        (
            neighbours,
            "shape",
            "Tensor.__getitem__",
            "has the shape (3, 3, 8, 8) for the batch and (0, 3, 8, 8)",
        ),
        (by_count, "samples", "Tensor.__truediv__", "combines samples"),
        (noisy, "random", "GaussianRNG", "draws random numbers"),
        (squeezed, "shape", "F.squeeze", "has the shape (4, 3) for the batch and (3,) for one sample"),
        (fixed, "fails", "Tensor.reshape", "fails on sample 0 alone, perhaps by a fixed size"),
    ],
)
def test_the_first_op_that_combines_samples_is_named(
    forward: Callable[..., Any], kind: str, op: str, problem: str
) -> None:
    report = check_samples(_traced(forward, conv=M.Conv2d(3, 3, 1)), X)
    assert report.difference is not None, report
    assert (report.difference.kind, report.difference.op) == (kind, op)
    assert problem in str(report)
    assert report.to_dict()["difference"]["node"] == report.difference.node


def test_only_the_outputs_that_differ_are_named() -> None:
    report = check_samples(_traced(centred, conv=M.Conv2d(3, 3, 1)), X)
    assert report.outputs == ("add_out",)


def test_inputs_of_another_length_are_given_whole() -> None:
    table = np.ones((1, 3, 1, 1), np.float32)
    traced = qtrace.trace(net(lambda self, x, t: {"y": x * t["scale"]}), X, {"scale": table}, check=False)
    assert check_samples(traced, X, {"scale": table}).passed


def test_what_cannot_be_compared_is_refused() -> None:
    traced = _traced(lambda self, x: F.relu(x))
    with pytest.raises(GraphError, match=r"the first input has 1 sample: give at least two"):
        check_samples(traced, X[:1])
    with pytest.raises(GraphError, match=r"takes a TracedModule, not a Conv2d"):
        check_samples(M.Conv2d(3, 3, 1), X)
    with pytest.raises(GraphError, match=r"was traced as forward\(Tensor\)"):
        check_samples(traced, X, X)
    with pytest.raises(GraphError, match=r"conv_out \(Conv2d, .*\) fails on x \(2, 4, 8, 8\) float32"):
        check_samples(
            _traced(lambda self, x: self.conv(x), conv=M.Conv2d(3, 3, 1)), np.ones((2, 4, 8, 8), "float32")
        )


@pytest.mark.parametrize("entry", parameters((*CNN, *TRANSFORMERS, *DETECTORS), ()))
def test_no_false_alarm_on_the_zoo(entry: Any) -> None:
    inputs = entry.example()
    report = check_samples(qtrace.trace(entry.build(), *inputs, check=False), *inputs)
    cause = report.difference and (report.difference.kind, report.difference.op)
    assert cause == COMBINING.get(entry.name), report

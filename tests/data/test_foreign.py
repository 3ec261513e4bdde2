"""Data that are no batches of arrays: one sentence with the cure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import megengine.module as M
import numpy as np
import pytest
from megengine import Tensor

import qtrace
from qtrace.data.batches import as_arguments, check_batches
from qtrace.errors import CalibrationError, GraphError, TraceError
from tests.nets import net

X = np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32)


def _traced() -> Any:
    module = net(lambda self, x: self.conv(x), conv=M.Conv2d(3, 4, 3))
    return qtrace.trace(module, Tensor(X), check=False)


class _Table:
    """A table as pandas has it."""

    columns = ("a", "b")

    def __iter__(self) -> Any:
        return iter(self.columns)

    def to_numpy(self) -> np.ndarray:
        return np.array([["text", 1.0]], object)

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        return self.to_numpy()


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ("images/", r"batches is the path 'images/': give an iterable of batches, such as a list of arrays"),
        (Path("x.npz"), r"batches is the path 'x.npz'"),
        (_Table(), r"batches is a _Table, which iterates over columns: give \[table"),
        (X, "batches is one ndarray: give an iterable of batches"),
        ({"x": X}, "batches is one dict"),
    ],
)
def test_one_thing_in_the_place_of_batches(batches: Any, message: str) -> None:
    with pytest.raises(CalibrationError, match=message):
        check_batches(batches)
    for call in (qtrace.calibrate, qtrace.compare):
        prepared = qtrace.prepare(_traced(), "int8")
        with pytest.raises(CalibrationError, match=message):
            call(prepared, batches)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ("a.jpg", "batch 0 holds the path 'a.jpg': give the arrays"),
        ([Path("a.jpg")], "batch 0 holds the path 'a.jpg'"),
        (_Table(), r"batch 0 holds object values: give arrays of numbers \(_Table; choose columns"),
        (np.moveaxis(X, 1, 3), r"NHWC: transpose \(0, 3, 1, 2\)"),
        (X[0], r"one sample: write x\[None\]"),
        (np.moveaxis(X[0], 0, 2), r"HWC: write x.transpose\(2, 0, 1\)\[None\]"),
        ((X, np.zeros(2)), "leave out what is no input, such as labels"),
    ],
)
def test_batches_of_other_things(batch: Any, message: str) -> None:
    prepared = qtrace.prepare(_traced(), "int8")
    with pytest.raises(CalibrationError, match=message):
        qtrace.calibrate(prepared, [batch], progress=False)


def test_images_of_pil() -> None:
    image = pytest.importorskip("PIL.Image").new("RGB", (8, 8))
    with pytest.raises(CalibrationError, match=r"an image of PIL: make an N x C x H x W array of it"):
        as_arguments(image, _traced())


def test_tensors_of_torch() -> None:
    torch = pytest.importorskip("torch")
    prepared = qtrace.prepare(_traced(), "int8")
    qtrace.calibrate(prepared, [torch.tensor(X, requires_grad=True)], progress=False)
    half = as_arguments(torch.tensor(X).bfloat16(), prepared)[0][0].numpy()
    np.testing.assert_array_equal(half, torch.tensor(X).bfloat16().float().numpy())
    with pytest.raises(CalibrationError, match="is one Tensor"):
        check_batches(torch.tensor(X))


def test_an_iterator_as_samples_is_refused() -> None:
    for samples in (iter([X]), (x for x in [X]), map(np.asarray, [X])):
        with pytest.raises(CalibrationError, match="samples is an iterator, from which prepare would take"):
            qtrace.prepare(_traced(), "int8", samples=samples)
        assert len(list(samples)) == 1  # nothing is lost


def test_data_that_end_after_the_first_reading_are_refused() -> None:
    class Once:
        def __init__(self) -> None:
            self.batches = iter([X, X])

        def __iter__(self) -> Any:
            return self.batches

    prepared = qtrace.prepare(_traced(), {"ptq": ["bias_correction"]})
    with pytest.raises(CalibrationError, match="no batch when they are read again"):
        qtrace.calibrate(prepared, Once(), progress=False)


def test_paths_in_the_place_of_models() -> None:
    with pytest.raises(GraphError, match=r"'net.onnx' is a path: read the network by qtrace.from_onnx"):
        qtrace.prepare("net.onnx")  # type: ignore[arg-type]
    with pytest.raises(TraceError, match=r"'net.onnx' is a path: read the network by qtrace.from_onnx"):
        qtrace.trace("net.onnx", X, check=False)  # type: ignore[arg-type]
    for call in (qtrace.calibrate, qtrace.compare):
        with pytest.raises(GraphError, match=r"'x.mge' is a path: read the model by qtrace.load"):
            call(Path("x.mge"), [X])  # type: ignore[arg-type]
    with pytest.raises(GraphError, match=r"'x.mge' is a path: read the model by qtrace.load"):
        qtrace.convert("x.mge")  # type: ignore[arg-type]

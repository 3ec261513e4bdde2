"""The one call on eight networks of unlike kinds: three lines give a verified file and its verdict."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from tests.nets import net
from tests.zoo.catalog import CNN
from tests.zoo.transformers.vit import Vit

LINES = """\
import qtrace
result = qtrace.quantize(network, data, out)
print(result)
"""


def _zoo(name: str) -> tuple[Callable[[], M.Module], tuple[int, ...]]:
    entry = next(entry for entry in CNN if entry.name == name)
    return entry.build, entry.input_shape


def _two_ends() -> M.Module:
    def forward(self: M.Module, x: Any) -> dict[str, Any]:
        y = F.relu(self.stem(x))
        return {"mask": F.sigmoid(self.mask(y)), "scores": self.scores(F.mean(y, (2, 3)))}

    layers = {"stem": M.Conv2d(3, 8, 3, padding=1), "mask": M.Conv2d(8, 1, 1), "scores": M.Linear(8, 5)}
    return net(forward, **layers)


def _recurrent() -> M.Module:
    return net(lambda self, x: self.last(self.lstm(x)[0]), lstm=M.LSTM(8, 12), last=M.Linear(12, 3))


def _perceptron() -> M.Module:
    return M.Sequential(M.Linear(20, 32), M.ReLU(), M.Linear(32, 4), M.Softmax())


# Name -> network, shape of a sample, form in which the call gets it, and suffix of the file.
NETWORKS: dict[str, tuple[Callable[[], M.Module], tuple[int, ...], str, str]] = {
    "mobilenet": (*_zoo("mobilenet_v2_relu6"), "module", ".onnx"),
    "vgg": (*_zoo("repvgg_deploy"), ".onnx", ".onnx"),
    "restoration": (*_zoo("dncnn"), ".onnx", ".onnx"),
    "transformer": (Vit, (3, 32, 32), ".mge", ".onnx"),
    "segmentation and scores": (_two_ends, (3, 16, 16), "traced", ".tflite"),
    "recurrent": (_recurrent, (6, 8), ".onnx", ".onnx"),
    "perceptron": (_perceptron, (20,), "module", ".tflite"),
    "residual, for a phone": (*_zoo("resnet_basic"), "traced", ".param"),
}


def _given(form: str, module: M.Module, x: np.ndarray, folder: Path) -> Any:
    """Returns a network in the form in which the call gets it."""
    if form == "module":
        return module
    traced = qtrace.trace(module, x, check=False)
    if form == "traced":
        return traced
    path = folder / f"float{form}"
    return str(qtrace.save(traced, path) or path) if form == ".mge" else str(qtrace.export(traced, path))


# Each form and suffix is met without these, too, and tests/zoo quantizes their layers.
_SLOW = {"mobilenet", "restoration", "transformer"}


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow(untimed=True)] * (name in _SLOW)) for name in NETWORKS],
)
def test_three_lines_give_a_verified_file_and_its_verdict(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build, shape, form, suffix = NETWORKS[name]
    data = np.random.default_rng(0).normal(size=(32, *shape)).astype(np.float32)
    out = tmp_path / f"int8{suffix}"
    names = {"network": _given(form, build(), data[:2], tmp_path), "data": data, "out": out}
    exec(LINES, names)
    result = names["result"]
    assert result.path == out
    assert out.stat().st_size > 0
    assert result.verdict.word in ("good", "check")  # the transformer has 26 dB
    assert result.verify.passed
    printed = capsys.readouterr().out
    assert printed.splitlines()[0] == str(out)
    assert len(printed.splitlines()) <= 40

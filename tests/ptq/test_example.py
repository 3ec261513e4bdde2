"""The planted fault of examples/ptq.py: it changes nothing in float, and equalization takes it away again."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import megengine as mge
import numpy as np
import pytest

import qtrace
from tests.nets import images, randomize

EXAMPLES = Path(__file__).parents[2] / "examples"


def _sqnr(reference: np.ndarray, output: np.ndarray) -> float:
    return float(10 * np.log10(np.sum(reference**2) / np.sum((reference - output) ** 2)))


def test_equalize_and_bias_correction_recover_what_stretched_channels_lose(monkeypatch: Any) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    digits, example = importlib.import_module("digits"), importlib.import_module("ptq")
    x = [np.abs(images(16, 1, 8, 8, seed=s)) for s in range(3)]
    net = randomize(digits.Net())
    expected = net(mge.Tensor(x[2])).numpy()

    def quantized(*ptq: str) -> float:
        config = qtrace.QConfig(weight={"axis": None}, ptq=["fuse_bn", *ptq])
        prepared = qtrace.prepare(qtrace.trace(net, x[0][:1], check=False), config)
        qtrace.calibrate(prepared, x[:2], progress=False)
        return _sqnr(expected, prepared(mge.Tensor(x[2])).numpy())

    healthy = quantized()
    example.plant(net)
    stretched = net(mge.Tensor(x[2])).numpy()
    assert np.abs(stretched - expected).max() <= 1e-5 * np.abs(expected).max()
    sick, cured = quantized(), quantized("equalize", "bias_correction")
    assert sick < healthy - 15
    assert cured > sick + 0.9 * (healthy - sick)

"""bisect: the first op that differs is the one at fault, and the cause is told from the differences."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import qtrace
from qtrace import cli
from qtrace.errors import CalibrationError
from qtrace.numerics import quantize
from qtrace.scheme import QParams, QScheme
from qtrace.verification.crosscheck import likely_causes
from tests.each import each_of
from tests.nets import images
from tests.verification.test_verify import _converted, _edit, _initializer, _net

BATCHES = [images(4, 4, 8, 8, seed=s) for s in range(2)]
QPARAMS = QParams(QScheme(bits=8, signed=False, symmetric=False), np.float32(0.05), np.int32(100))

FAULTS = {
    "a bias without its scale": ("a_bias_int", lambda v: v * 0, "F.conv2d"),
    "another bias of the second layer": ("b_bias_scale", lambda v: v * 8, "F.conv2d"),
    "the last layer's weights doubled": ("fc_weight_scale", lambda v: v * 2, "F.linear"),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_faulty_op_is_found_first(fault: str, tmp_path: Path) -> None:
    name, change, op = FAULTS[fault]
    converted = _converted(_net(), BATCHES)
    path = qtrace.export(converted, tmp_path / "m.onnx")
    assert qtrace.bisect(path, converted, BATCHES) is None
    _edit(path, lambda m: _initializer(m, name, change))
    found = qtrace.bisect(path, converted, BATCHES)
    assert found is not None
    assert (found.stage, found.batch, found.op) == ("plain", 0, op)
    report = qtrace.verify(path, converted, BATCHES)
    wrong = [n for n, tally in report.sites["op_by_op"].items() if tally.worst > 1]
    assert found.site == wrong[0]
    assert found.worst > 1
    assert 0 < found.differing <= found.values
    assert sum(found.histogram.values()) <= found.differing
    assert found.examples
    assert any("scale" in text for text in (found.qparams, *found.inputs))
    assert json.loads(json.dumps(found.to_dict()))["site"] == found.site
    for text in (found.site, op, "likely:", "before rounding"):
        assert text in found.table()


def _case(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Values before rounding in LSB, and what a faulty runtime makes of them."""
    x = np.random.default_rng(0).normal(size=(4, 3, 8, 8)) * 25 + 120
    if kind == "layout":
        return x, x.transpose(0, 1, 3, 2)
    if kind == "bias":
        return x, x + np.float64([5, -9, 3]).reshape(1, 3, 1, 1)
    if kind == "scale":
        return x, (x - 100) * 1.25 + 100
    if kind == "saturation":
        return x, np.where(x > 150, 255, x)
    x = np.round(x * 2) / 2
    return x, np.where(x % 1 == 0.5, np.floor(x + 0.5), x)


@each_of("kind", ["layout", "bias", "scale", "saturation", "rounding"])
def test_causes_are_reported_from_the_differences(kind: str) -> None:
    exact, theirs = _case(kind)
    mine = quantize(((exact - 100) * 0.05).astype(np.float32), QPARAMS).astype(np.int64)
    wrong = np.clip(np.round(theirs), 0, 255).astype(np.int64)
    (first, *_) = likely_causes(exact, mine, wrong, QPARAMS)
    assert first.startswith(kind)
    if kind == "rounding":
        assert first == "rounding: ties go up"


def test_noise_has_no_named_cause() -> None:
    exact = np.random.default_rng(1).normal(size=(4, 3, 8, 8)) * 25 + 120
    mine = np.round(exact).astype(np.int64)
    noise = np.random.default_rng(2).integers(-9, 10, mine.shape)
    assert likely_causes(exact, mine, mine + noise, QPARAMS)[0].startswith("unknown")


def test_command(tmp_path: Path) -> None:
    converted = _converted(_net(), BATCHES)
    path = qtrace.export(converted, tmp_path / "m.onnx")
    qtrace.save(converted, tmp_path / "q.mge")
    np.save(tmp_path / "x.npy", np.concatenate(BATCHES))
    args = ["bisect", str(path), "-m", str(tmp_path / "q.mge"), "-d", str(tmp_path / "x.npy"), "-q"]
    fine = CliRunner().invoke(cli.group, args, standalone_mode=False)
    assert fine.return_value == 0
    assert "no site differs by more than 1 LSB" in fine.output
    _edit(path, lambda m: _initializer(m, "fc_weight_scale", lambda v: v * 2))
    wrong = CliRunner().invoke(cli.group, [*args, "--json"], standalone_mode=False)
    assert wrong.return_value == 1
    with pytest.raises(CalibrationError, match="no batches"):
        qtrace.bisect(path, converted, [])

"""The losses of detectors: what they are, which outputs they take, and how the command line names these."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace import cli
from qtrace.comparing.runs import outputs_of
from qtrace.errors import ConfigError
from qtrace.graph.types import TracedModule
from qtrace.sensitivity import DetectionLoss, Goal, Level, analyze, mixed_precision
from qtrace.sensitivity.simulation import Simulation
from tests.nets import net

W4 = {"backend": "generic", "weight": {"bits": 4}, "activation": {"bits": 6}}


def _bce(p: np.ndarray, logits: np.ndarray) -> np.ndarray:
    q = 1 / (1 + np.exp(-logits))
    return -(p * np.log(q) + (1 - p) * np.log(1 - q))


def test_detection_losses_are_the_textbook_ones_where_the_float_graph_finds_something() -> None:
    rng = np.random.default_rng(0)
    f = [rng.normal(size=(2, 3, 4, 4)), rng.normal(size=(2, 4, 4, 4)), rng.normal(size=(2, 1, 4, 4))]
    q = [value + 0.1 * rng.normal(size=value.shape) for value in f]
    loss = DetectionLoss((Level(0, 1, 2),), threshold=0.4)
    (parts,) = loss.parts([f], [q])
    rows = [np.moveaxis(v, 1, -1).reshape(-1, v.shape[1]) for v in f]
    other = [np.moveaxis(v, 1, -1).reshape(-1, v.shape[1]) for v in q]
    p = [1 / (1 + np.exp(-row)) for row in rows]
    matched = p[0].max(1) * p[2][:, 0] >= 0.4
    assert 0 < matched.sum() < len(matched)
    wanted = (_bce(p[0], other[0]) - _bce(p[0], rows[0]))[matched].mean()
    assert parts["class"] == pytest.approx(wanted)
    assert parts["box"] == pytest.approx(
        np.abs(other[1] - rows[1])[matched].mean() / np.abs(rows[1])[matched].mean()
    )
    assert parts["objectness"] == pytest.approx((_bce(p[2], other[2]) - _bce(p[2], rows[2])).mean())
    assert loss([f], [q]) == pytest.approx(-sum(parts.values()))
    assert loss([f], [f]) == 0.0
    with pytest.raises(ConfigError, match="a level names output 5, but the graph gives 3 tensors"):
        DetectionLoss((Level(0, 5),)).parts([f], [q])


def _forward(self: M.Module, x: mge.Tensor) -> list[mge.Tensor]:
    found = []
    for layer in (self.fine, self.coarse):
        x = F.relu(layer(x))
        found += [self.what(x), self.where(x), self.there(x)]
    return found


@pytest.fixture(scope="module")
def traced() -> TracedModule:
    """Two levels with one head."""
    mge.random.seed(0)
    module = net(
        _forward,
        fine=M.Conv2d(3, 6, 3, 2, 1),
        coarse=M.Conv2d(6, 6, 3, 2, 1),
        what=M.Conv2d(6, 5, 1),
        where=M.Conv2d(6, 4, 1),
        there=M.Conv2d(6, 1, 1),
    )
    return qtrace.trace(module, _data()[0], check=False)


def _data() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=(2, 3, 8, 8)).astype(np.float32) for _ in range(2)]


@pytest.fixture(scope="module")
def prepared(traced: TracedModule) -> TracedModule:
    return qtrace.calibrate(qtrace.prepare(traced, W4), _data(), progress=False)


LEVELS = (Level(0, 1, 2), Level(3, 4, 5))


def test_outputs_are_named_as_in_an_exported_file(prepared: TracedModule, tmp_path: Path) -> None:
    import onnx

    file = qtrace.export(qtrace.convert(prepared), tmp_path / "model.onnx")
    names = [output.name for output in onnx.load(str(file)).graph.output]
    assert len(set(names)) == 6
    loss = DetectionLoss((Level(*names[:3]), Level(names[3], 4, names[5])))
    assert loss.of(prepared) == DetectionLoss(LEVELS)


def _both(model: TracedModule) -> tuple[Any, Any]:
    """The outputs in float and quantized."""
    found = []
    for phase in ("float", "quantize"):
        qtrace.set_phase(model, phase)
        found.append(outputs_of(model, _data()))
    return found[0], found[1]


def test_each_layer_has_its_losses_by_level(traced: TracedModule, prepared: TracedModule) -> None:
    loss = DetectionLoss(LEVELS)
    ranking = analyze(prepared, _data(), metric=loss)
    assert ranking.parts == loss.parts(*_both(prepared))
    assert ranking.quantized == loss(*_both(prepared))
    for row in ranking.layers:
        assert row.only == DetectionLoss.total(row.parts)
        assert [sorted(level) for level in row.parts] == [["box", "class", "objectness"]] * 2
    fine = next(row.layer for row in ranking.layers if row.layer.path == "fine")
    real = qtrace.prepare(traced, {**W4, "rules": [{"match": {"name": list(fine.nodes)}, "quantize": False}]})
    qtrace.calibrate(real, _data(), progress=False)
    found = Simulation(prepared, _data(), loss).answer([fine.name]).parts
    for level, wanted in zip(found, loss.parts(*_both(real)), strict=True):
        assert min(wanted.values()) > 0.0
        assert level == pytest.approx(wanted, rel=1e-3)
    table = ranking.table(None)
    assert "its objectness" in table.splitlines()[0]
    assert f"{ranking.parts[1]['box']:.4g}" in table
    assert ranking.to_dict()["layers"][0]["levels"] == list(ranking.layers[0].parts)
    assert "levels" not in analyze(prepared, _data()).to_dict()


WRONG = {
    "no such number": (Level(0, 1, 6), "a level names output 6, but the graph gives 6 tensors: 0 "),
    "below zero": (Level(-1, 1), "a level names output -1, but"),
    "no such name": (
        Level("nowhere", 1),
        "a level names output 'nowhere', but the graph gives 6 tensors: 0 ",
    ),
    "classes for boxes": (Level(1, 0), r"of shape \(2, 5, 4, 4\) cannot be the box of a level: it has 5 val"),
    "boxes for objectness": (Level(0, 1, 1), "cannot be the objectness of a level: it has 4 values"),
    "another level": (Level(0, 4), "are not of one level: but for axis 1, shapes must agree"),
    "no such axis": (Level(0, 1, axis=4), "lacks axis 4"),
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("fault", WRONG)
def test_wrong_outputs_are_reported_before_anything_is_calibrated(
    traced: TracedModule, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    level, said = WRONG[fault]
    monkeypatch.setattr("qtrace.sensitivity.mixed.calibrate", lambda *_, **__: pytest.fail("calibrated"))
    loss = DetectionLoss((level,))
    with pytest.raises(ConfigError, match=said):
        mixed_precision(traced, qtrace.QConfig(**W4), list(_data()), goal=Goal(1.0), metric=loss)


def test_a_loss_without_levels_or_with_no_score_is_refused(prepared: TracedModule) -> None:
    with pytest.raises(ConfigError, match="the outputs of a level at least"):
        DetectionLoss(())
    for threshold in (-0.1, 1.5, float("nan")):
        with pytest.raises(ConfigError, match="give a score, 0 to 1"):
            DetectionLoss(LEVELS, threshold)
    with pytest.raises(ConfigError, match="detection must know which outputs are what"):
        analyze(prepared, _data(), metric="detection")


@pytest.fixture
def place(traced: TracedModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    qtrace.save(traced, tmp_path / "float.mge")
    np.save("x.npy", np.concatenate(_data()))
    lines = ["schema: qtrace/1", "backend: generic", "weight: {bits: 4}", "activation: {bits: 6}"]
    Path("low.yaml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    lines = [lines[0], "imports: [low.yaml]", "expect: {metric: detection, max_drop: 0.01}"]
    Path("expecting.yaml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return tmp_path


def _run(capsys: pytest.CaptureFixture[str], *more: str, recipe: str = "low.yaml") -> SimpleNamespace:
    base = ["sensitivity", "float.mge", "-d", "x.npy", "--batch-size", "2", "-q", "-r", recipe]
    with pytest.raises(SystemExit) as caught:
        cli.main([*base, *more])
    captured = capsys.readouterr()
    return SimpleNamespace(code=caught.value.code, out=captured.out, err=captured.err)


DETECTION = ("--metric", "detection", "--level", "0,1,2", "--level", "3, 4, 5")


@pytest.mark.usefixtures("place")
def test_the_command_measures_what_python_does(
    prepared: TracedModule, capsys: pytest.CaptureFixture[str]
) -> None:
    result = _run(capsys, *DETECTION, "--threshold", "0.5", "--json")
    assert (result.code, result.err) == (0, "")
    wanted = analyze(prepared, _data(), metric=DetectionLoss(LEVELS, 0.5)).to_dict()
    written = json.loads(result.out)
    assert written.pop("measured_on").startswith("4 samples, all of --data")
    assert written == json.loads(json.dumps(wanted))


@pytest.mark.usefixtures("place")
def test_a_recipe_expects_a_detection_loss(capsys: pytest.CaptureFixture[str]) -> None:
    result = _run(capsys, *DETECTION, "--patch", "mixed.yaml", "--json", recipe="expecting.yaml")
    assert (result.code, result.err) == (0, "")
    found = json.loads(result.out)
    assert (found["in_float"], found["target"]) == (0.0, -0.01)
    assert found["quantized"] < -0.01 <= found["reached"]
    assert set(found["raised"]) <= set(qtrace.load_recipe("mixed.yaml").rules[-1].match.name or ())
    assert found["raised"]


REFUSED = {
    "no level": (("--metric", "detection"), "give --level CLS,BOX[,OBJ] for each level"),
    "half a level": (("--metric", "detection", "--level", "0"), "--level '0' is not of the form"),
    "an empty name": (("--metric", "detection", "--level", "0,,2"), "--level '0,,2' is not of the form"),
    "no such output": ((*DETECTION, "--level", "a,b"), "a level names output 'a', but the graph gives 6"),
    "a huge number": ((*DETECTION, "--level", f"{'9' * 5000},1"), "a level names output '9999"),
    "not on the last axis": ((*DETECTION, "--channels-last"), "values on axis -1, not"),
    "no score": ((*DETECTION, "--threshold", "1.5"), "the threshold of a detection loss is 1.5"),
    "level for another metric": (("--level", "0,1"), "--level is for --metric detection"),
    "threshold for another metric": (("--threshold", "0"), "--threshold is for --metric detection"),
    "axis for another metric": (("--channels-last",), "--channels-last is for --metric detection"),
}


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("fault", REFUSED)
def test_the_command_refuses_in_one_sentence(capsys: pytest.CaptureFixture[str], fault: str) -> None:
    more, said = REFUSED[fault]
    result = _run(capsys, *more)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert said in result.err

"""Sensitivity and mixed precision: what phases simulate, what the search finds, and the recipe it gives."""

from __future__ import annotations

import json
import re
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace import cli
from qtrace.calibration.base import EngineError
from qtrace.calibration.engines import OnnxSegments
from qtrace.comparing.sums import sqnr_db
from qtrace.errors import CalibrationError, ConfigError, ExportError
from qtrace.graph.types import TracedModule
from qtrace.preparation.model import QuantizedModel
from qtrace.sensitivity import Budget, Goal, analyze, mixed, mixed_precision
from qtrace.sensitivity.simulation import Simulation
from tests.nets import net

W4 = {"backend": "generic", "weight": {"bits": 4}, "activation": {"bits": 6}}


def _forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
    x = F.relu(self.a(x))
    x = x + F.relu(self.b(x))
    x = F.relu(self.c(x))
    return self.fc(F.flatten(F.avg_pool2d(x, 8), 1))


def _traced() -> TracedModule:
    module = net(
        _forward,
        a=M.Conv2d(3, 6, 3, padding=1),
        b=M.Conv2d(6, 6, 3, padding=1),
        c=M.Conv2d(6, 8, 1),
        fc=M.Linear(8, 4),
    )
    # One layer whose channels differ widely: with one scale it loses most of them.
    weight = module.c.weight.numpy().copy()
    weight[::2] *= 0.03
    module.c.weight._reset(mge.Parameter(weight))
    return qtrace.trace(module, _data(0)[0], check=False)


def _data(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(4, 3, 8, 8)).astype(np.float32) for _ in range(2)]


@pytest.fixture(scope="module")
def traced() -> TracedModule:
    return _traced()


@pytest.fixture(scope="module")
def prepared(traced: TracedModule) -> TracedModule:
    prepared = qtrace.prepare(traced, W4)
    qtrace.calibrate(prepared, _data(0), progress=False)
    return prepared


@pytest.fixture(scope="module")
def simulation(prepared: TracedModule) -> Simulation:
    return Simulation(prepared, _data(1))


def _outputs(model: TracedModule, phase: str) -> np.ndarray:
    qtrace.set_phase(model, phase)
    return np.concatenate([model(mge.Tensor(x)).numpy() for x in _data(1)])


def test_layers_are_the_ops_on_integers_with_their_sizes(simulation: Simulation) -> None:
    layers = {layer.name: layer for layer in simulation.layers}
    conv = layers["b_out"]
    assert (conv.kind, conv.macs, conv.parameters) == ("conv2d", 4 * 8 * 8 * 6 * 6 * 9, 6 * 6 * 9)
    assert (conv.weight_bits, conv.activation_bits) == (4, 6)
    assert conv.bops == conv.macs * 24
    assert conv.weight_bytes == 6 * 6 * 9 // 2
    assert [name for name, layer in layers.items() if layer.weight] == ["a_out", "b_out", "c_out", "fc_out"]


def test_simulation_with_all_or_no_layers_raised_equals_the_phases(
    prepared: TracedModule, simulation: Simulation
) -> None:
    f, q = _outputs(prepared, "float"), _outputs(prepared, "quantize")
    assert simulation.value() == pytest.approx(sqnr_db(f, q), abs=1e-6)
    assert simulation.value([layer.name for layer in simulation.layers]) == float("inf")
    assert simulation.noise() == pytest.approx(10 ** (-sqnr_db(f, q) / 10))
    np.testing.assert_array_equal(_outputs(prepared, "quantize"), q)


@pytest.mark.parametrize("name", ["a_out", "c_out", "fc_out"])
def test_raising_a_layer_is_what_its_rule_does(
    traced: TracedModule, simulation: Simulation, name: str
) -> None:
    nodes = next(layer.nodes for layer in simulation.layers if layer.name == name)
    rule = {"match": {"name": list(nodes)}, "quantize": False}
    real = qtrace.prepare(traced, {**W4, "rules": [rule]})
    qtrace.calibrate(real, _data(0), progress=False)
    f, q = _outputs(real, "float"), _outputs(real, "quantize")
    assert simulation.value([name]) == pytest.approx(sqnr_db(f, q), abs=1e-3)


def test_analyze_ranks_the_planted_layer_first(prepared: TracedModule) -> None:
    coarse = analyze(prepared, _data(1), groups=True)
    assert {row.layer.name for row in coarse.layers} >= {"a_out", "b_out", "c_out", "fc_out"}
    assert all(row.only >= coarse.quantized for row in coarse.layers)
    assert {row.group for row in coarse.groups} >= {"x", "c_weight", "fc_out"}
    table = coarse.table(None)
    assert table.splitlines()[2].split()[0] == coarse.by_cost()[0].layer.name
    assert f"sqnr with everything quantized: {coarse.quantized:.4g}" in table
    assert coarse.to_dict()["layers"][0]["layer"] == coarse.layers[0].layer.name


@pytest.mark.quick(1)
@pytest.mark.parametrize("groups", [False, True])
def test_the_progress_ends_at_its_total(
    prepared: TracedModule,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    groups: bool,
) -> None:
    monkeypatch.setattr("qtrace.display._ipython", object)
    analyze(prepared, _data(1), groups=groups)
    last = capsys.readouterr().err.split("\r")[-1]
    done, total = re.findall(r"(\d+)/(\d+)", last)[0]
    assert last.startswith("sensitivity: 100%")
    assert done == total
    assert int(total) > 8
    analyze(prepared, _data(1), groups=groups, progress=False)
    assert capsys.readouterr().err == ""


def test_a_search_shows_how_often_it_has_measured(
    traced: TracedModule, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qtrace.display._ipython", object)
    base = qtrace.QConfig(**W4)
    for progress, shown in ((True, True), (False, False)):
        mixed_precision(traced, base, _data(0), goal=Goal(at_least=15.0), progress=progress)
        assert ("sensitivity: " in capsys.readouterr().err) == shown


def test_fewest_layers_reach_the_goal_for_real(traced: TracedModule) -> None:
    base = qtrace.QConfig(**W4)
    found = mixed_precision(traced, base, _data(0), evaluation=_data(1), goal=Goal(at_least=26.0))
    assert found.quantized < 26.0 <= found.reached
    assert 0 < len(found.layers) <= (found.by_noise or 0)
    assert found.passed
    # The result is a config that does it.
    real = qtrace.prepare(traced, found.qconfig)
    qtrace.calibrate(real, _data(0), progress=False)
    value = sqnr_db(_outputs(real, "float"), _outputs(real, "quantize"))
    assert value == pytest.approx(found.reached, abs=1e-6)
    # No layer of it can be left out.
    names = [layer.name for layer in found.layers]
    again = Simulation(_calibrated(traced), _data(1))
    for name in names:
        assert again.value([other for other in names if other != name]) < 26.0
    # The knee begins with nothing raised and ends with all of them.
    assert [step.raised for step in found.steps] == [tuple(names[:n]) for n in range(len(names) + 1)]
    assert found.steps[0].macs == 1.0 > found.steps[-1].macs


def _calibrated(traced: TracedModule) -> TracedModule:
    prepared = qtrace.prepare(traced, W4)
    qtrace.calibrate(prepared, _data(0), progress=False)
    return prepared


def test_a_goal_that_holds_raises_nothing(traced: TracedModule) -> None:
    found = mixed_precision(traced, qtrace.QConfig(**W4), _data(0), goal=Goal(at_least=1.0))
    assert found.layers == ()
    assert found.by_noise == 0
    assert "rules" not in found.patch


class _Planted:
    """A graph whose quality follows from which layers are raised: order by noise misleads."""

    def __init__(self) -> None:
        self.layers = tuple(SimpleNamespace(name=name, macs=1) for name in "abcdef")
        self.gain = {"a": 0.0, "b": 0.0, "c": 0.0, "d": 3.0, "e": 3.0, "f": 0.5}
        self.loudness = {name: 6.0 - n for n, name in enumerate("abcdef")}

    def value(self, raised: Any = ()) -> float:
        return sum(self.gain[name] for name in raised)

    def noise(self, layer: Any) -> float:
        return self.loudness[layer.name]


def test_the_search_is_not_misled_by_noise_that_does_not_matter() -> None:
    planted: Any = _Planted()
    order = mixed.by_noise(planted)
    assert [layer.name for layer in order] == list("abcdef")
    found, ladder = mixed.fewest(planted, order, 6.0)
    assert ladder == 5
    assert sorted(found.raised) == ["d", "e"]


def test_bits_instead_of_float(traced: TracedModule) -> None:
    base = qtrace.QConfig(**W4)
    found = mixed_precision(traced, base, _data(0), goal=Goal(at_least=24.0), raise_to="w8a8")
    assert found.passed
    rule = found.qconfig.rules[-1].to_dict()
    assert (rule["weight"], rule["activation"]) == ({"bits": 8}, {"bits": 8})
    with pytest.raises(ConfigError, match="'w99' is no way to raise a layer"):
        mixed_precision(traced, base, _data(0), goal=Goal(at_least=24.0), raise_to="w99")


@pytest.mark.quick(1)
@pytest.mark.parametrize("unit", ["bytes", "bops"])
def test_a_budget_is_kept_and_used(traced: TracedModule, unit: str) -> None:
    base = qtrace.QConfig(**W4)
    low = Simulation(_calibrated(traced), _data(0))
    budget = Budget(unit, 1.3 * sum(Budget(unit, 1.0).cost(layer) for layer in low.layers))
    found = mixed_precision(traced, base, _data(0), goal=budget, raise_to="w8")
    assert found.cost is not None
    _, before, after = found.cost
    assert before < after <= budget.most
    assert found.reached > found.quantized
    for layer in found.layers:
        assert layer.weight
    with pytest.raises(ConfigError, match="without raising a layer, the budget is 10: start from fewer bits"):
        mixed_precision(traced, base, _data(0), goal=Budget("bytes", 10), raise_to="w8")


def test_own_metric_runs_the_graph(traced: TracedModule) -> None:
    x, truth = _data(1)[0], np.arange(4)

    def minus_error(model: Any) -> float:
        return -float(np.abs(model(mge.Tensor(x)).numpy() - truth[None]).mean())

    base = qtrace.QConfig(**W4)
    found = mixed_precision(traced, base, _data(0), goal=Goal(max_drop=1e-3), own=minus_error)
    assert found.metric == "minus_error"
    assert found.in_float == pytest.approx(minus_error(_float(traced)), abs=1e-6)
    assert found.reached >= found.in_float - 1e-3
    with pytest.raises(ConfigError, match="metric nothing returned NoneType: return a number"):
        mixed_precision(traced, base, _data(0), goal=Goal(max_drop=1.0), own=_named("nothing", None))
    with pytest.raises(ConfigError, match="metric wild returned nan"):
        mixed_precision(traced, base, _data(0), goal=Goal(max_drop=1.0), own=_named("wild", float("nan")))


def _float(traced: TracedModule) -> TracedModule:
    return traced


def _named(name: str, value: Any) -> Any:
    def function(model: Any) -> Any:
        return value

    function.__name__ = name
    return function


def test_mixed_precision_refuses_impossible_goals(traced: TracedModule, prepared: TracedModule) -> None:
    base = qtrace.QConfig(**W4)
    with pytest.raises(ConfigError, match="either at_least or max_drop"):
        mixed_precision(traced, base, _data(0), goal=Goal())
    with pytest.raises(ConfigError, match="infinite: give at_least"):
        mixed_precision(traced, base, _data(0), goal=Goal(max_drop=1.0))
    with pytest.raises(
        CalibrationError, match="no set of layers reaches 101: with all of them in float it is 100"
    ):
        mixed_precision(traced, base, _data(0), goal=Goal(at_least=101), metric="agreement")
    with pytest.raises(ConfigError, match="unknown metric 'psnr'; known: sqnr, agreement"):
        analyze(prepared, _data(1), metric="psnr")
    with pytest.raises(CalibrationError, match="no batches"):
        analyze(prepared, [])


def test_the_command_writes_a_recipe_that_works(
    traced: TracedModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    qtrace.save(traced, tmp_path / "float.mge")
    np.save("x.npy", np.concatenate(_data(0)))
    Path("low.yaml").write_text(
        "schema: qtrace/1\nbackend: generic\nweight: {bits: 4}\nactivation: {bits: 6}\n", encoding="utf-8"
    )
    Path("out").mkdir()
    base = ["sensitivity", "float.mge", "--data", "x.npy", "--recipe", "low.yaml"]

    def run(*more: str) -> SimpleNamespace:
        with pytest.raises(SystemExit) as caught:
            cli.main([*base, *more])
        captured = capsys.readouterr()
        return SimpleNamespace(code=caught.value.code, out=captured.out, err=captured.err)

    table = run()
    assert table.code == 0
    assert "sqnr, only it" in table.out
    result = run("--at-least", "24", "--patch", "out/mixed.yaml", "--json")
    assert result.code == 0
    document = json.loads(result.out)
    assert document["reached"] >= 24
    config = qtrace.load_recipe(tmp_path / "out" / "mixed.yaml")
    assert list(config.rules[-1].match.name or ()) == document["raised"]
    real = qtrace.prepare(traced, config)
    qtrace.calibrate(real, [np.concatenate(_data(0))], progress=False)
    Path("evaluation.py").write_text("def top1(model):\n    return 1.0\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    with Path("low.yaml").open("a", encoding="utf-8") as file:
        file.write("expect: {metric: top1, max_drop: 0.5}\n")
    expected = run("--metric", "evaluation:top1", "--json")
    assert expected.code == 0
    assert json.loads(expected.out)["target"] == 0.5
    two = run("--at-least", "24", "--max-drop", "1")
    assert (two.code, two.err.count("\n")) == (2, 1)
    assert "--at-least and --max-drop are two goals" in two.err
    alone = run("--patch", "mixed.yaml")
    assert alone.code == 2
    assert "--patch is written by a search" in alone.err
    assert not Path("mixed.yaml").exists()


def test_raising_weights_alone_leaves_activations_rounded(
    traced: TracedModule, prepared: TracedModule
) -> None:
    simulation = Simulation(prepared, _data(1), activations=False)
    names = [layer.name for layer in simulation.layers]
    found = simulation.value(names)
    # The same, prepared for real: float weights are those of 16 bits, to 4 digits.
    wide = qtrace.prepare(traced, {**W4, "weight": {"bits": 16}})
    qtrace.calibrate(wide, _data(0), progress=False)
    truth = sqnr_db(_outputs(wide, "float"), _outputs(wide, "quantize"))
    assert found == pytest.approx(truth, abs=0.5)
    assert simulation.value() < found < simulation.in_float() == float("inf")
    # A layer's noise is that of its weight alone: c_out's, with one scale for channels that differ widely.
    layer = next(layer for layer in simulation.layers if layer.name == "c_out")
    alone = qtrace.prepare(traced, W4)
    qtrace.calibrate(alone, _data(0), progress=False)
    f = _outputs(alone, "float")
    alone.qsites.c_weight.phase = "quantize"
    q = np.concatenate([alone(mge.Tensor(x)).numpy() for x in _data(1)])
    assert simulation.noise(layer) == pytest.approx(10 ** (-sqnr_db(f, q) / 10), rel=1e-3)


def test_a_search_for_weights_foretells_what_it_comes_to(traced: TracedModule) -> None:
    base = qtrace.QConfig(**W4)
    found = mixed_precision(traced, base, _data(0), goal=Budget("bytes", 500), raise_to="w16")
    assert found.layers
    assert found.steps[-1].value == pytest.approx(found.reached, abs=1.0)
    assert "sqnr, raised weights in float" in found.table()
    with pytest.raises(CalibrationError, match="with all of their weights in float it is"):
        mixed_precision(traced, base, _data(0), goal=Goal(at_least=90.0), raise_to="w8")


class TestChangedWeights:
    """Algorithms of ``ptq`` write other weights: errors are still those against the network."""

    CONFIG = {**W4, "ptq": ["fuse_bn", "gptq", "bias_correction"]}

    @staticmethod
    def _calibrated(traced: TracedModule) -> TracedModule:
        prepared = qtrace.prepare(traced, TestChangedWeights.CONFIG)
        return qtrace.calibrate(prepared, _data(0), progress=False)

    @staticmethod
    def _truth(traced: TracedModule, prepared: TracedModule) -> float:
        x = mge.Tensor(np.concatenate(_data(1)))
        return sqnr_db(traced(x).numpy(), prepared(x).numpy())

    def test_the_network_is_the_reference(self, traced: TracedModule) -> None:
        prepared = self._calibrated(traced)
        before = {name: p.numpy().copy() for name, p in prepared.named_parameters()}
        found = analyze(prepared, _data(1), float_model=traced)
        truth = self._truth(traced, prepared)
        assert found.quantized == pytest.approx(truth, abs=1e-3)
        assert not found.note
        assert all(np.array_equal(p.numpy(), before[name]) for name, p in prepared.named_parameters())
        alone = analyze(prepared, _data(1))
        assert abs(alone.quantized - truth) > 3
        assert "gptq, bias_correction changed the weights" in alone.table()

    def test_a_raised_layer_has_its_float_weight(self, traced: TracedModule) -> None:
        prepared = self._calibrated(traced)
        twin = qtrace.prepare(traced, W4)
        simulation = Simulation(prepared, _data(1), twin=twin)
        assert simulation.value([layer.name for layer in simulation.layers]) > 90  # a sum in another order
        # The order of what is raised does not matter, so nothing of one question is left in the next.
        assert simulation.value(["c_out"]) == simulation.value(["c_out"])

    def test_the_search_is_judged_against_the_network(self, traced: TracedModule) -> None:
        found = mixed_precision(
            traced, self.CONFIG, _data(0), goal=Goal(at_least=1.0), evaluation=_data(1), raise_to="w8"
        )
        assert found.quantized == pytest.approx(self._truth(traced, self._calibrated(traced)), abs=1e-3)


def test_a_network_that_equalize_has_changed_is_still_the_reference() -> None:
    module = net(lambda self, x: self.b(F.relu6(3.0 * self.a(x))), a=M.Conv2d(3, 6, 3), b=M.Conv2d(6, 4, 1))
    x = 4 * _data(1)[0]
    traced = qtrace.trace(module, x, check=False)
    config = {**W4, "ptq": ["fuse_bn", {"equalize": {"relu6": "relu"}}]}
    prepared = qtrace.calibrate(qtrace.prepare(traced, config), [x], progress=False)
    truth = sqnr_db(traced(mge.Tensor(x)).numpy(), prepared(mge.Tensor(x)).numpy())
    assert analyze(prepared, [x], float_model=traced).quantized == pytest.approx(truth, abs=1e-3)
    found = qtrace.compare(prepared, [x], float_model=traced)
    assert found.outputs[0].sqnr_db == pytest.approx(truth, abs=1e-3)
    alone = qtrace.compare(prepared, [x])
    assert abs(alone.outputs[0].sqnr_db - truth) > 1  # a ReLU against a ReLU6 is no error of rounding


def test_a_fast_engine_finds_what_megengine_does(
    traced: TracedModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = qtrace.calibrate(qtrace.prepare(traced, W4), _data(0), progress=False)
    slow = analyze(prepared, _data(1), groups=True, engine="megengine")
    runs = []
    write = OnnxSegments._write
    monkeypatch.setattr(OnnxSegments, "_write", lambda *args: runs.append(1) or write(*args))
    fast = analyze(prepared, _data(1), groups=True, engine="onnxruntime")
    assert len(runs) == 2 + 2 * len(fast.layers) + len(fast.groups)  # the float graph and the whole one, too
    for ours, theirs in zip((*fast.layers, *fast.groups), (*slow.layers, *slow.groups), strict=True):
        assert ours.only == pytest.approx(theirs.only, abs=0.05)
    assert [row.without for row in fast.layers] == pytest.approx(
        [row.without for row in slow.layers], abs=0.05
    )


def test_what_the_fast_engine_cannot_compute_is_left_to_megengine(
    traced: TracedModule, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> Any:
        raise ExportError("this op has no ONNX form")

    monkeypatch.setattr(OnnxSegments, "_write", refuse)
    caplog.set_level("INFO", "qtrace")
    prepared = qtrace.calibrate(qtrace.prepare(traced, W4), _data(0), progress=False)
    caplog.clear()
    ranking = analyze(prepared, _data(1), engine="onnxruntime")
    assert ranking == analyze(prepared, _data(1), engine="megengine")
    assert [r.getMessage() for r in caplog.records if "has no ONNX form" in r.getMessage()] != []


def test_layer_groups_are_measured_in_parallel_with_equal_results(
    traced: TracedModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = qtrace.calibrate(qtrace.prepare(traced, W4), _data(0), progress=False)
    simulation = Simulation(prepared, [*_data(1), *_data(2)], engine="onnxruntime")
    groups = list(QuantizedModel(prepared).fake_quants)[:4]
    alone = [simulation.only_group(group) for group in groups]
    begin, two, begun, waited = OnnxSegments.begin, Event(), [], []

    def wait_for_the_next(*args: Any) -> Any:
        finish = begin(*args)
        begun.append(1)
        if len(begun) == 2:
            two.set()
        return lambda use: waited.append(two.wait(30)) or finish(use)

    monkeypatch.setattr(OnnxSegments, "begin", wait_for_the_next)
    assert list(simulation.only_groups(groups)) == alone
    assert waited == [True] * len(groups)


@pytest.mark.parametrize("part", [1, 1 << 30])
def test_groups_of_a_network_in_parts_are_measured_alike(
    part: int, traced: TracedModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = qtrace.calibrate(qtrace.prepare(traced, W4), _data(0), progress=False)
    simulation = Simulation(prepared, _data(1), engine="onnxruntime")
    groups = list(QuantizedModel(prepared).fake_quants)[:3]
    monkeypatch.setattr("qtrace.graph.stepping.PART_BYTES", part)
    runs, write = [], OnnxSegments._write
    monkeypatch.setattr(OnnxSegments, "_write", lambda *args: runs.append(1) or write(*args))
    assert list(simulation.only_groups(groups)) == [simulation.only_group(group) for group in groups]
    assert (len(runs) > 2 * len(groups)) == (part == 1)


def test_groups_that_the_engine_refuses_when_it_runs_are_left_to_megengine(
    traced: TracedModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = qtrace.calibrate(qtrace.prepare(traced, W4), _data(0), progress=False)
    groups = list(QuantizedModel(prepared).fake_quants)[:3]
    slow = Simulation(prepared, _data(1), engine="megengine")
    expected = [slow.only_group(group) for group in groups]
    simulation = Simulation(prepared, _data(1), engine="onnxruntime")

    def refuse(*_: Any, **__: Any) -> Any:
        raise EngineError("it refuses the graph")

    monkeypatch.setattr("qtrace.calibration.engines.start_session", refuse)
    assert list(simulation.only_groups(groups)) == pytest.approx(expected, abs=0.05)


def _unlike(self: M.Module, x: mge.Tensor, z: mge.Tensor) -> mge.Tensor:
    return F.concat([self.a(x), self.b(z)], axis=1)


def test_what_is_prepared_here_is_measured_on_the_given_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Generated inputs are of one range; the data is not, and one grid loses the second part of the join."""
    module = net(_unlike, a=M.Conv2d(3, 4, 3, padding=1), b=M.Conv2d(3, 4, 3, padding=1))
    batches = [{"x": 600 * a, "z": np.float32(0.5) * b} for a, b in (_data(0), _data(1))]
    traced = qtrace.trace(module, batches[0]["x"], batches[0]["z"], check=False)
    result = mixed_precision(traced, "backend/tflite", batches, goal=Goal(at_least=1.0), progress=False)
    assert result.quantized > 25.0
    qtrace.save(traced, tmp_path / "m.mge")
    np.savez(tmp_path / "d.npz", **{k: np.concatenate([b[k] for b in batches]) for k in "xz"})
    command = ["sensitivity", str(tmp_path / "m.mge"), "--data", str(tmp_path / "d.npz"), "--json"]
    with pytest.raises(SystemExit, match="0"):
        cli.main([*command, "-r", "backend/tflite"])
    assert json.loads(capsys.readouterr().out)["quantized"] > 25.0

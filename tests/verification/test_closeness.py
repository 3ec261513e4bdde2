"""The verdict from end to end: as close to float as the graph, and as often float's prediction."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import qtrace
from qtrace.comparing.selections import SelectedShares, Share
from qtrace.errors import ExportError, GraphError
from qtrace.graph.types import TracedModule
from qtrace.preparation.phases import in_phase
from qtrace.targets.onnxruntime import runtime as onnxruntime
from qtrace.verification.report import VerifyReport
from qtrace.verification.runtimes.base import RuntimeRun
from qtrace.verification.tallies import Closeness
from tests.each import each_of
from tests.nets import images, net

BATCHES = [images(8, 3, 8, 8, seed=s) for s in range(3)]


def _chaotic(self: M.Module, x: mge.Tensor) -> mge.Tensor:
    """Each layer makes differences larger, and the bounded function keeps the values at their size."""
    for i in range(10):
        x = F.tanh(getattr(self, f"c{i}")(x) * 4.0)
    return self.fc(F.flatten(x, 1))


def _deep(width: int = 8) -> M.Module:
    layers = {f"c{i}": M.Conv2d(width if i else 3, width, 3, padding=1) for i in range(10)}
    return net(_chaotic, fc=M.Linear(64 * width, 10), **layers)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> tuple[TracedModule, TracedModule, Path]:
    traced = qtrace.trace(_deep(), BATCHES[0], check=False)
    prepared = qtrace.calibrate(qtrace.prepare(traced), BATCHES[:2], progress=False)
    converted = qtrace.convert(prepared)
    return traced, converted, qtrace.export(converted, tmp_path_factory.mktemp("deep") / "m.onnx")


def test_ties_that_a_deep_network_amplifies_are_no_fault(
    deep: tuple[TracedModule, TracedModule, Path],
) -> None:
    _, converted, path = deep
    report = qtrace.verify(path, converted, BATCHES[2:])
    assert report.worst_lsb() == 1
    assert report.sqnr_db("reference") < 35
    assert report.passed, report.summary()
    sums = report.closeness["reference"]["fc_out"]
    assert sums.runtime_db == pytest.approx(sums.graph_db, abs=1.0)
    assert sums.predictions == 8
    text = report.summary()
    assert "to float (the graph without its roundings): graph 5." in text
    assert "float's predictions: graph" in text
    data = json.loads(json.dumps(report.to_dict()))
    assert data["to_float"]["deployed"]["fc_out"]["graph_db"] == pytest.approx(sums.graph_db)
    # A limit of one's own still counts.
    assert not qtrace.verify(path, converted, BATCHES[2:], min_sqnr_db=35).passed


def test_float_is_the_graph_without_roundings_or_the_network_that_is_given(
    deep: tuple[TracedModule, TracedModule, Path],
) -> None:
    traced, converted, path = deep
    x = mge.Tensor(BATCHES[2])
    exact = traced(x).numpy().astype(np.float64)
    with in_phase(converted, "float"):
        np.testing.assert_allclose(converted(x).numpy(), exact, rtol=1e-3, atol=1e-4)
    noise = float(np.square(converted(x).numpy() - exact).sum())
    prepared = qtrace.prepare(traced)
    for given, source in ((traced, "network"), (prepared, "network"), (None, "graph without its roundings")):
        report = qtrace.verify(path, converted, BATCHES[2:], float_model=given, optimized=False)
        assert report.closeness["reference"]["fc_out"].graph == pytest.approx(noise, rel=0.01)
        assert report.float_source == f"the {'float ' * (source == 'network')}{source}"


def test_other_float_networks_are_refused(deep: tuple[TracedModule, TracedModule, Path]) -> None:
    _, converted, path = deep
    with pytest.raises(GraphError, match="the float network is a Linear: give the traced module"):
        qtrace.verify(path, converted, BATCHES[2:], float_model=M.Linear(2, 2))  # type: ignore[arg-type]
    for forward, message in (
        (lambda self, x: (x, x), "the float network has 2 outputs and the graph 1"),
        (lambda self, x: x * 2.0, r"fc_out has shape \(8, 3, 8, 8\) in the float network and \(8, 10\)"),
    ):
        other = qtrace.trace(net(forward), BATCHES[0], check=False)
        with pytest.raises(GraphError, match=message):
            qtrace.verify(path, converted, BATCHES[2:], float_model=other)


def test_the_file_of_another_model_fails(
    deep: tuple[TracedModule, TracedModule, Path], tmp_path: Path
) -> None:
    _, converted, _ = deep
    module = _deep()
    for parameter in module.parameters():
        parameter._reset(mge.Parameter(parameter.numpy() * 1.01))
    traced = qtrace.trace(module, BATCHES[0], check=False)
    other = qtrace.convert(qtrace.calibrate(qtrace.prepare(traced), BATCHES[:2], progress=False))
    path = qtrace.export(other, tmp_path / "other.onnx")
    with pytest.raises(ExportError, match="another calibration or other weights"):
        qtrace.verify(path, converted, BATCHES[2:])
    model = onnx.load(path)
    del model.metadata_props[:]  # nothing in the file says where it comes from
    onnx.save(model, path)
    report = qtrace.verify(path, converted, BATCHES[2:])
    assert not report.passed
    assert "differs by" in report.summary()


def test_a_wrong_scale_fails_although_the_network_is_far_from_float(
    deep: tuple[TracedModule, TracedModule, Path], tmp_path: Path
) -> None:
    _, converted, path = deep
    model = onnx.load(path)
    tensor = next(t for t in model.graph.initializer if t.name == "fc_weight_scale")
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(0.9), tensor.name))
    onnx.save(model, tmp_path / "m.onnx")
    report = qtrace.verify(tmp_path / "m.onnx", converted, BATCHES[2:])
    assert not report.passed
    assert report.worst_lsb() > 1


def _report(mode: str, exact: np.ndarray, graph: np.ndarray, runtime: np.ndarray) -> VerifyReport:
    report = VerifyReport("m.onnx", 1, 0.999, 35.0, float_source="the float network")
    report.add("op_by_op", "a_q", np.zeros(4, np.int64), np.zeros(4, np.int64))
    report.add_outputs("reference", ["y"], [graph], [graph])
    report.add_outputs(mode, ["y"], [graph], [runtime])
    report.add_closeness(mode, ["y"], [exact], [graph], [runtime])
    return report


def _noisy(exact: np.ndarray, ratio_db: float, seed: int) -> np.ndarray:
    noise = np.random.default_rng(seed).standard_normal(exact.shape)
    return exact + noise * np.sqrt(np.square(exact).mean()) * 10 ** (-ratio_db / 20)


EXACT = np.random.default_rng(0).standard_normal((64, 4, 5))


@each_of(
    ("graph_db", "runtime_db", "passes"),
    [(15.0, 15.0, True), (15.0, 14.4, True), (15.0, 13.5, False), (15.0, 20.0, True), (80.0, 70.0, True)],
)
def test_noise_may_be_one_decibel_larger(graph_db: float, runtime_db: float, passes: bool) -> None:
    report = _report("deployed", EXACT, _noisy(EXACT, graph_db, 1), _noisy(EXACT, runtime_db, 2))
    assert report.passed == passes
    if not passes:
        assert "output y (deployed) is 13." in report.summary()
        assert "only the optimized form falls short" in report.summary()
        assert report.failing_modes() == ["deployed"]


def test_a_few_values_are_no_proof() -> None:
    """Two samples of one value each: the noise of both differs by 3 dB by chance alone."""
    exact, graph, runtime = (np.array(v)[:, None] for v in ([1.0, 2.0], [1.1, 2.1], [1.2, 2.0]))
    assert _report("reference", exact, graph, runtime).passed


def test_noise_in_one_direction_fails_where_the_graph_has_none() -> None:
    report = _report("reference", EXACT, EXACT, EXACT * 0.99)
    assert not report.passed
    assert "from end to end single LSBs (ties, the order of sums) add up" in report.summary()
    assert "or verify more samples: on few, two runs of one network differ in noise" in report.summary()


def test_values_that_are_not_finite_on_one_side_fail() -> None:
    runtime = EXACT.copy()
    runtime[0, 0, 0] = np.nan
    report = _report("deployed", EXACT, EXACT, runtime)
    assert "outputs (deployed) are not finite on one side" in report.problems()
    masked = EXACT.copy()
    masked[0] = -np.inf
    assert _report("deployed", masked, masked, masked.copy()).passed


def test_predictions_must_be_floats_as_often() -> None:
    scores = np.eye(10)[np.arange(200) % 10]
    graph, runtime = scores.copy(), scores.copy()
    graph[:4] = scores[1:5]
    runtime[:20] = scores[1:21]
    sums = Closeness()
    sums.add(scores, graph, runtime)
    assert (sums.predictions, sums.graph_agreeing, sums.runtime_agreeing) == (200, 196, 180)
    assert any("has float's prediction 180 times in the runtime and 196" in p for p in sums.problems())
    few = Closeness()
    few.add(scores[:4], scores[:4], scores[[1, 2, 3, 3]])
    assert (few.runtime_agreeing, few.discordant) == (1, 3)
    assert not any("prediction" in problem for problem in few.problems())


def test_integers_and_probabilities_are_predictions_and_images_are_not() -> None:
    classes = np.arange(100, dtype=np.int32)
    integers = Closeness()
    integers.add(classes, classes, classes + (classes % 2))
    assert (integers.predictions, integers.runtime_agreeing, integers.signal) == (100, 50, 0.0)
    assert list(integers.problems())
    columns = np.exp(EXACT) / np.exp(EXACT).sum(axis=-1, keepdims=True)
    for values, predictions in ((columns, 256), (EXACT, 0), (EXACT[:, 0], 64), (EXACT[:, 0, :1], 0)):
        sums = Closeness()
        sums.add(values, values, values)
        assert sums.predictions == predictions


def test_where_no_output_can_be_compared_the_ops_decide_and_the_report_says_so() -> None:
    report = VerifyReport(
        "m.onnx", 1, 0.999, 35.0, float_source="the float network", selections={"y": "nms (net.py:3)"}
    )
    report.add("op_by_op", "a_q", np.zeros(4, np.int64), np.zeros(4, np.int64))
    report.add_outputs("reference", ["y"], [EXACT], [EXACT], ["y"])
    report.add_closeness("reference", ["y"], [EXACT[:3]], [EXACT], [EXACT])
    assert report.passed
    assert "float: no output can be compared with it, so the ops alone decide" in report.summary()


class _WrongWhenOptimized(onnxruntime.OnnxSession):
    """With optimizations, some integers of the last layer are off by ``step``, and its outputs with them."""

    step = 8

    def __init__(self, path: Path, optimize: bool) -> None:
        super().__init__(path, False)
        self.wrong = optimize

    def run(self, inputs: list[np.ndarray]) -> RuntimeRun:
        run = super().run(inputs)
        if not self.wrong:
            return run
        integers, output = run.integers["fc_out"].copy(), run.outputs[0].copy()
        steps = np.unique(output)
        integers[:, 0] = np.where(
            integers[:, 0] < 128, integers[:, 0] + self.step, integers[:, 0] - self.step
        )
        moved = self.step * np.diff(steps).min()
        output[:, 0] += np.where(run.integers["fc_out"][:, 0] < 128, moved, -moved)
        return RuntimeRun([output], {**run.integers, "fc_out": integers})


@pytest.mark.parametrize("step", [1, 8])
def test_an_optimized_kernel_that_is_wrong_within_the_noise_fails(
    step: int, deep: tuple[TracedModule, TracedModule, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From end to end, 8 steps in a few values are less than the noise of the graph."""
    _, converted, path = deep
    runtime = dataclasses.replace(onnxruntime.RUNTIME, open=_WrongWhenOptimized)
    monkeypatch.setattr(onnxruntime, "RUNTIME", runtime)
    monkeypatch.setattr(_WrongWhenOptimized, "step", step)
    report = qtrace.verify(path, converted, BATCHES[:1])
    assert not list(report.closeness["deployed"]["fc_out"].problems())
    assert report.passed == (step == 1)
    if step == 8:
        assert report.problems() == [
            "site fc_out_q differs by 8 LSB with the runtime's optimizations, 1 allowed"
        ]
        assert "only the optimized form falls short" in report.summary()
        assert report.to_dict()["optimized"]["fc_out_q"]["worst"] == 8
        assert qtrace.bisect(path, converted, BATCHES[:1]) is not None


def test_remarks_on_float_files_have_no_lsb() -> None:
    report = VerifyReport("m.onnx", 1, 0.999, 60.0, end_to_end_db=60.0, selections={"y": "nms (net.py:3)"})
    report.add_outputs("reference", ["x"], [EXACT], [EXACT])
    report.add_outputs("reference", ["y"], [EXACT], [EXACT[:3]])
    assert report.passed
    assert "its rows depend on values, which nms (net.py:3) selects" in report.summary()
    assert "LSB" not in report.summary()
    assert "op by op" not in report.summary()


@each_of(
    ("graph", "runtime", "word"),
    [
        (Share(300, 300, None, 20, 20), Share(300, 300, None, 20, 20), ""),
        (Share(290, 300, None, 20, 20), Share(284, 300, None, 18, 20), ""),
        (Share(300, 300, None, 20, 20), Share(280, 300, None, 0, 20), "selects 0 of float's rows in the"),
        (Share(300, 300), Share(0, 300), "selects 0 of float's rows in the runtime and 300 in the graph"),
        (Share(0, 300), Share(300, 300), ""),  # the graph is worse, which its own verdict tells
    ],
)
def test_a_runtime_that_selects_fewer_of_floats_rows_fails(graph: Share, runtime: Share, word: str) -> None:
    selected = SelectedShares((frozenset({0}),), ("topk index",)).empty()
    report = VerifyReport("net.onnx", 1, 0.99, 35.0, outputs={"deployed": {}}, selected=selected)
    selected.add([graph])
    report.add_selected("deployed", [runtime])
    problems = report.problems()
    assert [word in problem for problem in problems] == ([True] if word else [])


def test_tiny_probabilities_are_as_exact_as_a_sigmoid_is(tmp_path: Path) -> None:
    """A detector gave no file where the images of the verification showed nothing."""
    conv = M.Conv2d(3, 6, 3)

    def detect(self: M.Module, x: mge.Tensor, shift: float) -> mge.Tensor:
        y = F.flatten(self.a(x), 2).transpose(0, 2, 1)
        return F.concat([y[:, :, :4] * 50.0, F.sigmoid(y[:, :, 4:] - shift)], axis=2)

    def traced(shift: float) -> TracedModule:
        return qtrace.trace(net(lambda self, x: detect(self, x, shift), a=conv), BATCHES[0], check=False)

    blank = traced(18.0)
    path = qtrace.export(blank, tmp_path / "blank.onnx")
    report = qtrace.verify(path, blank, BATCHES[:1], float_model=blank)
    assert report.passed, report.summary()
    other = qtrace.verify(path, traced(12.0), BATCHES[:1], float_model=blank)  # 6e-6 is not 1.5e-8
    assert "concat_out, columns 4..5 has 0.0 dB" in "; ".join(other.problems())

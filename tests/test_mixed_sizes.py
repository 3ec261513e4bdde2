"""Batches that differ in open axes: all that takes data takes them, and values count, not batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import megengine as mge
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from megengine.traced_module import TracedModule

import qtrace
from qtrace.calibration.running import Result, RunSettings, Source, collect_all
from qtrace.config import QConfig
from qtrace.extras.finetune import FinetuneSettings
from qtrace.extras.tune import TuneSettings, tune
from qtrace.observers.base import to_dict
from qtrace.preparation.model import QuantizedModel
from qtrace.sensitivity import analyze
from qtrace.sensitivity.diagnosis import measure_inputs
from tests.mixed_sizes import WIDTHS, few_lines, lines, traced, write_file

LINES = Source("tests.mixed_sizes:lines", batch_size=1)
CONFIG = {"placement": "everything", "observers": {"activation": "percentile"}}


@pytest.fixture(params=["traced", pytest.param("imported", marks=pytest.mark.slow(untimed=True))])
def graph(request: pytest.FixtureRequest, tmp_path: Path) -> TracedModule:
    return (
        traced()
        if request.param == "traced"
        else qtrace.from_onnx(write_file(tmp_path), {"x": (1, 3, 8, 16)})
    )


def collect(prepared: TracedModule, folder: Path, **settings: Any) -> Result:
    folder.mkdir(exist_ok=True)
    return collect_all(prepared, LINES.open(), LINES, folder, RunSettings(**{"seconds": None, **settings}))


def state(result: Result) -> Any:
    statistics = result.collected.statistics
    assert len(statistics.batches) == len(WIDTHS)
    return {name: to_dict(observer) for name, observer in statistics.observers.items()}


class Stopped:
    """The lines up to a batch at which the process is interrupted."""

    def __init__(self) -> None:
        self.inner = LINES.open()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def numbered(self, *functions: Any) -> Iterator[tuple[int, Any]]:
        for number, batch in self.inner.numbered(*functions):
            if number == 19:
                raise KeyboardInterrupt
            yield number, batch


@pytest.mark.quick(1)
@pytest.mark.parametrize("engine", ["megengine", "onnxruntime"])
def test_a_killed_and_resumed_calibration_sees_the_same(engine: str, tmp_path: Path) -> None:
    prepared = qtrace.prepare(traced(), CONFIG)
    whole = state(collect(prepared, tmp_path / "whole", engine=engine))
    folder = tmp_path / "killed"
    folder.mkdir()
    with pytest.raises(KeyboardInterrupt):
        collect_all(prepared, Stopped(), LINES, folder, RunSettings(seconds=None, engine=engine))  # type: ignore[arg-type]
    result = collect(prepared, folder, engine=engine)
    assert result.resumed == 19
    assert state(result) == whole


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["megengine", "onnxruntime"])
def test_two_workers_see_the_same(engine: str, tmp_path: Path) -> None:
    prepared = qtrace.prepare(traced(), CONFIG)
    alone = state(collect(prepared, tmp_path / "alone", engine=engine))
    assert state(collect(prepared, tmp_path / "two", engine=engine, workers=2)) == alone


@pytest.mark.parametrize("engine", ["megengine", "onnxruntime"])
def test_ranges_are_those_of_all_values(engine: str) -> None:
    prepared = qtrace.prepare(
        traced(), {**CONFIG, "observers": {"activation": {"percentile": {"percentile": 90}}}}
    )
    qtrace.calibrate(prepared, lines(), progress=False, engine=engine)
    site = next(s for s in QuantizedModel(prepared).sites if s.source.name == "x")
    values = np.concatenate([x.ravel() for x in lines()])
    high = float(site.qparams.scale * (site.qparams.scheme.qmax - site.qparams.zero_point))
    assert high == pytest.approx(np.percentile(values, 90), rel=0.05)


def test_every_stage_takes_lines_of_all_widths(graph: TracedModule, tmp_path: Path) -> None:
    batches = lines()
    prepared = qtrace.prepare(graph, CONFIG, samples=batches)
    qtrace.calibrate(prepared, batches, progress=False)
    assert qtrace.compare(prepared, batches[:8]).outputs
    assert analyze(prepared, batches[:4], progress=False).layers
    settings = FinetuneSettings(steps=2, batch_size=2, evaluate_every=1, max_minutes=1)
    qtrace.finetune(prepared, few_lines(), settings, teacher=graph, progress=False)
    converted = qtrace.convert(prepared)
    path = qtrace.export(converted, tmp_path / "net.onnx")
    assert qtrace.verify(path, converted, batches[:8]).passed


def test_inputs_are_measured_by_values_not_by_lines() -> None:
    values = np.concatenate([x.transpose(0, 2, 3, 1).reshape(-1, 3) for x in lines()]).astype(np.float64)
    (measured,) = measure_inputs(lines())
    assert measured.mean == pytest.approx(values.mean(axis=0), rel=1e-6)
    assert measured.deviation == pytest.approx(values.std(axis=0), rel=1e-6)


def test_a_file_is_quantized_in_one_call_on_lines_of_all_widths(tmp_path: Path) -> None:
    path = write_file(tmp_path)
    first = lines()[3]  # no power of two divides its width
    result = qtrace.quantize(path, [first, *lines()], tmp_path / "int8.onnx", progress=False)
    assert result.verify is not None
    assert result.verify.passed
    graph = onnx.load(result.path).graph
    sizes = [d.dim_param or d.dim_value for d in graph.input[0].type.tensor_type.shape.dim]
    assert sizes == ["N", 3, 8, "W"]
    session = ort.InferenceSession(str(result.path), providers=["CPUExecutionProvider"])
    for x in lines()[:4]:
        (theirs,) = session.run(None, {"x": x})
        mine = result.converted(mge.Tensor(x)).numpy()
        np.testing.assert_allclose(mine, theirs, atol=1e-3 * np.abs(theirs).max())


def test_tuning_judges_lines_of_all_widths(tmp_path: Path) -> None:
    start = QConfig.model_validate(CONFIG)
    result = tune(traced(), start, few_lines(), tmp_path / "best", TuneSettings(trials=2))
    assert len(result.trials) == 2


@pytest.mark.parametrize("algorithm", ["smooth", "gptq", "bias_correction"])
def test_algorithms_learn_from_lines_of_all_widths(algorithm: str) -> None:
    prepared = qtrace.prepare(traced(), {**CONFIG, "ptq": [algorithm]}, samples=lines())
    qtrace.calibrate(prepared, lines(), progress=False)

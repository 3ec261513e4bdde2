"""The algorithms of the calibrated stage compute their layers in onnxruntime, and MegEngine what is left."""

from __future__ import annotations

import logging
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace import QConfig
from qtrace.calibration import engines
from qtrace.calibration.choice import Chosen, choose_segments
from qtrace.calibration.engines import OnnxSegments
from qtrace.errors import ConfigError, ExportError
from qtrace.export.onnx.segment import PreparedSegments
from qtrace.graph import stepping
from qtrace.graph.stepping import GraphSegment, keep
from qtrace.graph.walk import exprs
from qtrace.preparation.model import QuantizedModel
from qtrace.process import prefetch_map
from qtrace.ptq.layers import statistics as collecting
from tests.nets import images, net

BATCHES = [images(n, 4, 8, 8, seed=n) for n in (4, 4, 3)]
PTQ = ("fuse_bn", {"gptq": {"refit": True}}, "bias_correction")


def _prepared(backend: str = "onnxruntime", bits: int = 8, stem_in_float: bool = False) -> Any:
    def forward(self: Any, x: Any) -> Any:
        x = F.relu(self.stem(x))
        return self.head(F.relu(self.a(x) + self.down(x)).mean(axis=(2, 3)))

    module = net(
        forward,
        stem=M.Conv2d(4, 4, 3, padding=1),
        a=M.Conv2d(4, 6, 3, padding=1),
        down=M.Conv2d(4, 6, 1),
        head=M.Linear(6, 5),
    )
    config: dict[str, Any] = {"backend": backend, "ptq": PTQ}
    if stem_in_float:
        config["rules"] = [{"match": {"name": name}, "quantize": False} for name in ("stem", "relu_out")]
    if bits != 8:
        config |= {"weight": {"bits": bits}, "activation": {"bits": bits}}
    return qtrace.prepare(qtrace.trace(module, mge.Tensor(BATCHES[0]), check=False), QConfig(**config))


def _calibrated(engine: str, **options: Any) -> Any:
    prepared = _prepared(**options)
    qtrace.calibrate(prepared, BATCHES, progress=False, engine=engine)
    return prepared


def _record_segments(monkeypatch: pytest.MonkeyPatch) -> list[GraphSegment]:
    """Records all segments that onnxruntime computes."""
    computed: list[GraphSegment] = []
    write = OnnxSegments._write

    def record(self: Any, segment: GraphSegment) -> Any:
        computed.append(segment)
        return write(self, segment)

    monkeypatch.setattr(OnnxSegments, "_write", record)
    return computed


def _compute(engine: OnnxSegments, traced: Any, expr: Any, batches: Any) -> list[Any] | None:
    """Returns the outputs of an expr for each batch; None if the engine leaves it to MegEngine."""
    run = engine.begin(GraphSegment(traced, [expr], {}, batches, expr.outputs))
    return None if run is None else run(keep)


def _integers(prepared: Any) -> np.ndarray:
    model = QuantizedModel(qtrace.convert(prepared), "converted")
    weights = (site for site in model.sites if site.sort == "weight")
    values = [site.integers(site.source.expr.interpret(model.module)[0].numpy()).ravel() for site in weights]
    return np.concatenate(values)


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("backend", "bits", "stem_in_float"),
    [
        ("onnxruntime", 8, False),
        ("onnxruntime", 8, True),
        ("generic", 4, False),
        ("megengine", 8, False),
        ("esp_dl_s3", 8, False),
    ],
)
def test_the_integers_are_those_of_megengine(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    backend: str,
    bits: int,
    stem_in_float: bool,
) -> None:
    computed = _record_segments(monkeypatch)
    options: dict[str, Any] = {"backend": backend, "bits": bits, "stem_in_float": stem_in_float}
    with caplog.at_level(logging.INFO, "qtrace"):
        fast = _calibrated("onnxruntime", **options)
    assert len(computed) > 6
    assert "MegEngine computes" not in caplog.text
    computed.clear()
    slow = _calibrated("megengine", **options)
    assert not computed
    first, second = _integers(fast), _integers(slow)
    assert first.any()
    assert np.mean(first != second) <= 0.01  # ties of float32 sums
    for name in ("a.bias", "head.bias"):
        first, second = (dict(model.named_tensors())[name].numpy() for model in (fast, slow))
        np.testing.assert_allclose(first, second, rtol=1e-3, atol=2e-3)


def test_what_no_rounding_precedes_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = _record_segments(monkeypatch)
    prepared = _calibrated("onnxruntime", stem_in_float=True)
    graphs = [
        part.traced
        for part in computed
        if len(part.exprs) < 5 and any(n.name == "stem_out" for e in part.exprs for n in e.outputs)
    ]
    # gptq computes it once in each graph, bias_correction once for both.
    assert len(graphs) == 2
    assert graphs.count(prepared) == 1


def test_megengine_computes_what_has_no_onnx_form(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: Any, *args: Any) -> Any:
        raise ExportError("conv2d has no ONNX form.")

    monkeypatch.setattr(PreparedSegments, "model", refuse)
    with caplog.at_level(logging.INFO, "qtrace"):
        fast = _calibrated("onnxruntime")
    assert "conv2d has no ONNX form" in caplog.text
    np.testing.assert_array_equal(_integers(fast), _integers(_calibrated("megengine")))


def test_the_engine_of_calibrate_is_that_of_the_algorithms() -> None:
    model = QuantizedModel(_prepared(), "prepared")
    assert choose_segments(model, "megengine") is None
    assert choose_segments(model, "auto", 2) is None  # there is little to compute
    assert isinstance(choose_segments(model, "onnxruntime"), OnnxSegments)
    assert isinstance(choose_segments(model, Chosen("onnxruntime", "as asked")), OnnxSegments)
    assert choose_segments(model, Chosen("onnxruntime", "not all", everywhere=False)) is None
    with pytest.raises(ConfigError, match="unknown engine 'other'"):
        choose_segments(model, "other")


def test_the_algorithms_compute_on_the_given_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int | None] = []

    def record(run: Any, items: Any, threads: int | None) -> Any:
        counts.append(threads)
        return prefetch_map(run, items, threads)

    monkeypatch.setattr(engines, "prefetch_map", record)
    qtrace.calibrate(_prepared(), BATCHES, progress=False, engine="onnxruntime", threads=1)
    assert set(counts) == {1}


def test_batches_of_other_shapes_run_in_one_session() -> None:
    model = QuantizedModel(_prepared(), "prepared")
    traced = model.module
    expr = next(e for e in exprs(traced) if e.outputs and e.outputs[0].name == "relu_out")
    node = expr.inputs[-1]
    batches = [{node: images(2, 4, size, 8) - 0.5} for size in (8, 6)]
    results = _compute(OnnxSegments(model), traced, expr, batches)
    assert results is not None
    for values, (result,) in zip(batches, results, strict=True):
        np.testing.assert_array_equal(result, np.maximum(values[node], 0))


def test_a_batch_that_onnxruntime_refuses_is_left_to_megengine(caplog: pytest.LogCaptureFixture) -> None:
    model = QuantizedModel(_prepared(), "prepared")
    expr = next(e for e in exprs(model.module) if e.outputs and e.outputs[0].name == "relu_out")
    node = expr.inputs[-1]
    for other in (np.zeros((2, 4), np.float32), np.zeros((2, 4, 8, 8), np.float64)):
        engine, batches = OnnxSegments(model), [{node: images(2, 4, 8, 8)}, {node: other}]
        with caplog.at_level(logging.INFO, "qtrace"):
            assert _compute(engine, model.module, expr, batches) is None
        assert _compute(engine, model.module, expr, batches[:1]) is None  # once refused
    assert "another number of axes" in caplog.text
    assert "onnxruntime refuses the batch" in caplog.text


def test_fake_quants_that_do_more_than_rounding_have_no_onnx_form() -> None:
    prepared = _prepared()
    model = QuantizedModel(prepared, "prepared")
    expr = next(e for e in exprs(prepared) if e.outputs and e.outputs[0].name == "x_q")
    batches = [{expr.args[1]: images(2, 4, 8, 8)}]
    qtrace.set_phase(prepared, "observe")
    assert _compute(OnnxSegments(model), prepared, expr, batches) is None
    qtrace.set_phase(prepared, "float")
    (result,), *_ = _compute(OnnxSegments(model), prepared, expr, batches) or [()]
    np.testing.assert_array_equal(result, images(2, 4, 8, 8))


def test_large_networks_are_computed_in_parts_of_few_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _record_segments(monkeypatch)
    expected = _calibrated("onnxruntime")
    count = len(whole)
    monkeypatch.setattr(stepping, "PART_BYTES", 64)
    monkeypatch.setattr(collecting, "PART_BYTES", 64)
    in_parts = _record_segments(monkeypatch)
    result = _calibrated("onnxruntime")
    assert len(in_parts) > count
    for name, value in result.state_dict().items():
        np.testing.assert_allclose(value, expected.state_dict()[name], rtol=1e-5, atol=1e-6, err_msg=name)

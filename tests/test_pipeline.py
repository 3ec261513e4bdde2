"""The road as a user's program walks it: prepare, calibrate, train, convert, save and load."""

from __future__ import annotations

import copy
import functools
import itertools
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest
from megengine.autodiff import GradManager
from megengine.jit import trace as jit_trace
from megengine.optimizer import SGD

import qtrace
from qtrace import QConfig, QParams
from qtrace.errors import CalibrationError, ConfigError, GraphError, QtraceError
from qtrace.graph.lint import lint
from qtrace.graph.types import TracedModule
from qtrace.preparation.model import fake_quants
from qtrace.preparation.passes.insert import CONTAINER
from tests.each import each_of
from tests.nets import MobileNetV2, ResNet, images, net, randomize

SHAPE = (3, 16, 16)
BATCHES = [images(4, *SHAPE, seed=s) for s in range(3)]
X = mge.Tensor(BATCHES[0])
W4A4 = {"activation": {"bits": 4}, "weight": {"bits": 4, "narrow": False}}


def _small() -> M.Module:
    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu6(self.bn2(self.depthwise(y)) + y)
        return self.fc(F.mean(y, (2, 3)))

    return net(
        forward,
        conv1=M.Conv2d(3, 6, 3, padding=1, bias=False),
        bn1=M.BatchNorm2d(6),
        depthwise=M.Conv2d(6, 6, 3, padding=1, groups=6),
        bn2=M.BatchNorm2d(6),
        fc=M.Linear(6, 4),
    )


@functools.cache
def _traced() -> TracedModule:
    return qtrace.trace(_small(), BATCHES[0], check=False)


def _prepared(calibrated: bool = True, **config: Any) -> TracedModule:
    prepared = qtrace.prepare(_traced(), QConfig(**config))
    return qtrace.calibrate(prepared, BATCHES, progress=False) if calibrated else prepared


def _sqnr(reference: np.ndarray, output: np.ndarray) -> float:
    return float(10 * np.log10(np.sum(reference**2) / np.sum((reference - output) ** 2)))


# -- prepare -------------------------------------------------------------------------------------------


def test_prepare_leaves_source_and_trace_alone_and_computes_the_same() -> None:
    module = _small()
    before = {k: np.array(v) for k, v in module.state_dict().items()}
    traced = qtrace.trace(module, BATCHES[0])
    text = str(traced.graph)
    prepared = qtrace.prepare(traced)
    np.testing.assert_allclose(prepared(X).numpy(), module(X).numpy(), rtol=1e-5, atol=1e-6)
    assert str(traced.graph) == text
    for key, value in module.state_dict().items():
        np.testing.assert_array_equal(value, before[key])
    assert lint(prepared) == []


@pytest.mark.quick(1)
@pytest.mark.parametrize("model", [ResNet(4, (1, 1)), MobileNetV2(0.25, blocks=(1, 2, 1))])
def test_original_state_dict_loads_for_all_shared_names(model: M.Module) -> None:
    randomize(model)
    x = images(1, 3, 32, 32)
    traced = qtrace.trace(model, x, check=False)
    prepared = qtrace.prepare(traced)
    unfolded = qtrace.prepare(traced, QConfig(qat={"bn": {"fold": False}}))
    state = model.state_dict()
    for target in (prepared, unfolded):
        names = set(target.state_dict())
        shared = {k: v for k, v in state.items() if k in names}
        assert {k for k in state if k.endswith(("conv1.weight", "fc.weight", "fc.bias"))} <= set(shared)
        target.load_state_dict(shared, strict=False)
        loaded = target.state_dict()
        for key, value in shared.items():
            np.testing.assert_array_equal(loaded[key], value)
    # With the BatchNorms kept, every name of the float model is there, and the float model is restored.
    assert set(state) <= set(unfolded.state_dict())
    np.testing.assert_allclose(
        unfolded(mge.Tensor(x)).numpy(), model(mge.Tensor(x)).numpy(), rtol=1e-5, atol=1e-6
    )


def test_qconfig_forms_are_the_same() -> None:
    traced = qtrace.trace(_small(), BATCHES[0], check=False)
    graphs = {
        str(qtrace.prepare(traced, q).graph)
        for q in (None, QConfig(), "onnxruntime", {"backend": "onnxruntime"})
    }
    assert len(graphs) == 1


def test_prepare_refuses_what_it_cannot_take() -> None:
    with pytest.raises(GraphError, match=r"qtrace\.trace"):
        qtrace.prepare(_small())
    with pytest.raises(GraphError, match="already"):
        qtrace.prepare(_prepared())
    with pytest.raises(ConfigError, match="nothere"):
        qtrace.prepare(qtrace.trace(_small(), BATCHES[0], check=False), "nothere")


# -- calibrate -----------------------------------------------------------------------------------------


@pytest.mark.quick(2)
@pytest.mark.parametrize("observer", ["minmax", "moving_average", "percentile", "mse"])
def test_every_observer_calibrates_and_output_stays_close(observer: str) -> None:
    prepared = _prepared(observers={"activation": observer, "weight": "minmax"})
    assert all(fq.calibrated and fq.phase == "quantize" for fq in fake_quants(prepared))
    # The moving average clips what only one batch reaches.
    floor = 15 if observer == "moving_average" else 25
    assert _sqnr(_small()(X).numpy(), prepared(X).numpy()) > floor


@functools.cache
def _expected() -> list[QParams]:
    return [fq.qparams() for fq in fake_quants(_prepared())]


@each_of("form", ["tensor", "array", "tuple", "list", "dict", "generator"])
def test_batches_in_every_form_give_the_same_parameters(form: str) -> None:
    make = {
        "tensor": lambda b: mge.Tensor(b),
        "array": lambda b: b,
        "tuple": lambda b: (b,),
        "list": lambda b: [mge.Tensor(b)],
        "dict": lambda b: {"x": b},
        "generator": lambda b: b.astype(np.float64),
    }[form]
    batches = (make(b) for b in BATCHES) if form == "generator" else [make(b) for b in BATCHES]
    prepared = qtrace.calibrate(_prepared(calibrated=False), batches, progress=False)
    assert [fq.qparams() for fq in fake_quants(prepared)] == _expected()


def test_max_batches_and_a_second_calibration_start_anew() -> None:
    first = qtrace.calibrate(_prepared(calibrated=False), BATCHES, max_batches=1, progress=False)
    again = qtrace.calibrate(_prepared(), BATCHES[:1], progress=False)
    assert [f.qparams() for f in fake_quants(first)] == [f.qparams() for f in fake_quants(again)]


def test_no_data_is_an_error_and_leaves_the_module_as_it_was() -> None:
    prepared = _prepared(calibrated=False)
    with pytest.raises(CalibrationError, match="no batches"):
        qtrace.calibrate(prepared, [], progress=False)
    with pytest.raises(CalibrationError, match=r"sites lack .*, the first is \w+: run qtrace\.calibrate"):
        qtrace.set_phase(prepared, "quantize")
    calibrated = _prepared()
    before = [f.qparams() for f in fake_quants(calibrated)]
    with pytest.raises(CalibrationError):
        qtrace.calibrate(calibrated, iter(()), progress=False)
    assert [f.qparams() for f in fake_quants(calibrated)] == before
    assert all(f.phase == "quantize" for f in fake_quants(calibrated))


@each_of("bad", [np.nan, np.inf, -np.inf])
def test_not_finite_values_name_site_and_batch(bad: float) -> None:
    batches = [b.copy() for b in BATCHES]
    batches[1][0, 0, 0, 0] = bad
    with pytest.raises(CalibrationError, match=r"batch 1 .*input (0|x) |x.*batch 1"):
        qtrace.calibrate(_prepared(calibrated=False), batches, progress=False)


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "batch", [np.zeros((2, 5, 16, 16), np.float32), (BATCHES[0], BATCHES[0]), np.array(["a"]), [[1, 2], [3]]]
)
def test_batches_that_do_not_fit_name_the_batch(batch: Any) -> None:
    with pytest.raises(CalibrationError, match="batch 1"):
        qtrace.calibrate(_prepared(calibrated=False), [BATCHES[0], batch], progress=False)


def test_dead_and_constant_channels_get_valid_scales() -> None:
    module = _small()
    module.conv1.weight[0] = 0.0
    module.bn1.weight[:, 1] = 0.0
    prepared = qtrace.prepare(qtrace.trace(module, BATCHES[0], check=False))
    qtrace.calibrate(prepared, BATCHES, progress=False)
    assert np.isfinite(prepared(X).numpy()).all()
    assert _sqnr(module(X).numpy(), prepared(X).numpy()) > 25


def test_a_large_bias_on_a_tiny_weight_still_fits_into_int32(tmp_path: Path) -> None:
    module = net(lambda self, x: self.c(x), c=M.Conv2d(3, 4, 1))
    module.c.weight[1] = 1e-12
    module.c.bias[:, 1] = 3.0
    prepared = qtrace.prepare(qtrace.trace(module, BATCHES[0], check=False))
    qtrace.calibrate(prepared, BATCHES, progress=False)
    actual, expected = prepared(X).numpy()[:, 1], module(X).numpy()[:, 1]
    np.testing.assert_allclose(actual, expected, atol=0.05)
    converted = qtrace.convert(prepared)
    report = qtrace.verify(qtrace.export(converted, tmp_path / "m.onnx"), converted, BATCHES[:1])
    assert report.passed, report.table()


# -- phases --------------------------------------------------------------------------------------------


def test_phases_need_no_surgery_and_say_what_is_wrong() -> None:
    prepared = _prepared()
    text = str(prepared.graph)
    quantized = prepared(X).numpy()
    expected = _small()(X).numpy()
    for phase in ("float", "observe", "float"):
        qtrace.set_phase(prepared, phase)
        np.testing.assert_allclose(prepared(X).numpy(), expected, rtol=1e-5, atol=1e-6)
    qtrace.set_phase(prepared, "quantize")
    np.testing.assert_array_equal(prepared(X).numpy(), quantized)
    assert str(prepared.graph) == text
    with pytest.raises(ConfigError, match="'quantise'.*float, observe, quantize, train"):
        qtrace.set_phase(prepared, "quantise")
    with pytest.raises(GraphError, match="not a prepared"):
        qtrace.set_phase(qtrace.trace(_small(), BATCHES[0], check=False), "float")
    with pytest.raises(GraphError, match="converted"):
        qtrace.set_phase(qtrace.convert(prepared), "float")


# -- QAT in the user's own loop ------------------------------------------------------------------------


@pytest.mark.quick(1)
@pytest.mark.usefixtures("synchronous")
@pytest.mark.parametrize(
    ("fakequant", "fold", "jit"),
    [
        ("fixed", True, None),
        ("lsq", False, None),
        ("lsq", True, "symbolic"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in itertools.product(("fixed", "lsq"), (True, False), (None, "static", "symbolic"))
            if case not in (("fixed", True, None), ("lsq", False, None), ("lsq", True, "symbolic"))
        ),
    ],
)
def test_training_lowers_the_loss_and_convert_equals_quantize(
    fakequant: str, fold: bool, jit: str | None, tmp_path: Path
) -> None:
    prepared = _prepared(fakequant=fakequant, qat={"bn": {"fold": fold}}, activation={"bits": 8})
    qtrace.set_phase(prepared, "train")
    prepared.train()
    parameters = list(prepared.parameters())
    manager, optimizer = GradManager().attach(parameters), SGD(parameters, lr=0.05)
    target = mge.Tensor(np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4))

    def step() -> mge.Tensor:
        with manager:
            loss = F.loss.square_loss(prepared(X), target)
            manager.backward(loss)
        return loss

    run = step if jit is None else jit_trace(step, symbolic=jit == "symbolic")
    scales = {n: p.numpy().copy() for n, p in prepared.named_parameters() if n.endswith("scale")}
    losses = []
    for _ in range(12):
        losses.append(float(run().numpy()))
        optimizer.step().clear_grad()
    assert losses[-1] < 0.8 * losses[0]
    assert bool(scales) == (fakequant == "lsq")
    moved = [
        n
        for n, before in scales.items()
        if not np.array_equal(before, dict(prepared.named_parameters())[n].numpy())
    ]
    assert len(moved) == len(scales)
    prepared.eval()
    qtrace.set_phase(prepared, "quantize")
    converted = qtrace.convert(prepared)
    np.testing.assert_array_equal(converted(X).numpy(), prepared(X).numpy())
    assert not list(getattr(converted, CONTAINER).parameters())
    report = qtrace.verify(qtrace.export(converted, tmp_path / "m.onnx"), converted, BATCHES)
    assert report.passed, report.table()


@pytest.mark.usefixtures("synchronous")
def test_kept_batchnorm_trains_on_batch_statistics() -> None:
    prepared = _prepared(qat={"bn": {"fold": False}})
    qtrace.set_phase(prepared, "train")
    before = prepared.bn1.running_mean.numpy().copy()
    prepared.train()
    prepared(X)
    assert not np.array_equal(prepared.bn1.running_mean.numpy(), before)
    prepared.eval()
    after = prepared.bn1.running_mean.numpy().copy()
    prepared(X)
    np.testing.assert_array_equal(prepared.bn1.running_mean.numpy(), after)


def test_jit_forward_equals_eager_in_the_quantize_phase() -> None:
    prepared = _prepared(**W4A4)
    run = jit_trace(lambda x: prepared(x), symbolic=True)
    expected = prepared(X).numpy()
    for _ in range(3):
        actual = run(X).numpy()
    scale = float(getattr(prepared, CONTAINER).fc_out.qparams().scale)
    # MegEngine's jit may sum in another order: one step of the output's grid at most.
    assert np.abs(actual - expected).max() <= 1.01 * scale


# -- convert -------------------------------------------------------------------------------------------


def test_where_nothing_is_quantized_nothing_is_left_over(tmp_path: Path) -> None:
    x = images(2, 3, 4, 4)
    traced = qtrace.trace(net(lambda self, x: F.exp(x).reshape(2, -1)), x)
    prepared = qtrace.prepare(traced)
    with pytest.raises(CalibrationError, match="the graph lacks sites"):
        qtrace.calibrate(prepared, [x], progress=False)
    qtrace.save(prepared, tmp_path / "m.mge")
    for model in (prepared, qtrace.convert(prepared), qtrace.load(tmp_path / "m.mge")):
        assert qtrace.graph.lint(model) == []
        np.testing.assert_allclose(model(mge.Tensor(x)).numpy(), np.exp(x).reshape(2, -1), rtol=1e-6)


@pytest.mark.parametrize("backend", ["onnxruntime", "megengine"])
def test_convert_records_qparams_on_every_site_and_keeps_no_observer(backend: str) -> None:
    prepared = _prepared(backend=backend)
    converted = qtrace.convert(prepared)
    np.testing.assert_array_equal(converted(X).numpy(), prepared(X).numpy())
    nodes = {n.name: n for e in converted.graph._exprs for n in e.outputs}
    nodes.update((n.name, n) for n in converted.graph.inputs)
    annotation = qtrace.explain(converted).annotation
    assert {s.sort for s in annotation.sites} == {"activation", "weight", "bias"}
    for site in annotation.sites:
        qparams = nodes[site.node].qparams
        assert qparams is not None, site
        if site.sort == "bias":
            assert qparams.dtype_meta.name == "qint32"
            continue
        expected = getattr(prepared, CONTAINER).__dict__[site.group].qparams()
        np.testing.assert_array_equal(qparams.scale.numpy().reshape(-1), expected.scale.reshape(-1))
        if qparams.zero_point is not None:
            np.testing.assert_array_equal(
                qparams.zero_point.numpy().reshape(-1), expected.zero_point.reshape(-1)
            )
    assert all(fq.observer is None for fq in fake_quants(converted))
    assert lint(converted) == []


def test_convert_needs_calibration() -> None:
    with pytest.raises(CalibrationError, match="never calibrated"):
        qtrace.convert(_prepared(calibrated=False))


# -- copies and files ----------------------------------------------------------------------------------


@pytest.mark.quick(1)
@pytest.mark.parametrize("fakequant", ["fixed", "lsq"])
def test_deepcopy_state_dict_and_files_keep_every_number(fakequant: str, tmp_path: Path) -> None:
    prepared = _prepared(fakequant=fakequant)
    expected = prepared(X).numpy()
    np.testing.assert_array_equal(copy.deepcopy(prepared)(X).numpy(), expected)
    other = _prepared(fakequant=fakequant)
    for fq in fake_quants(other):
        fq.scale._reset(type(fq.scale)(fq.scale.numpy() * 2))
    other.load_state_dict(prepared.state_dict())
    np.testing.assert_array_equal(other(X).numpy(), expected)
    qtrace.save(prepared, tmp_path / "prepared.mge")
    loaded = qtrace.load(tmp_path / "prepared.mge")
    np.testing.assert_array_equal(loaded(X).numpy(), expected)
    qtrace.calibrate(loaded, BATCHES, progress=False)
    np.testing.assert_array_equal(loaded(X).numpy(), expected)
    converted = qtrace.convert(loaded)
    qtrace.save(converted, tmp_path / "converted.mge")
    again = qtrace.load(tmp_path / "converted.mge")
    np.testing.assert_array_equal(again(X).numpy(), expected)
    assert qtrace.verify(qtrace.export(again, tmp_path / "m.onnx"), again, BATCHES).passed


def test_a_model_saved_while_observing_goes_on_observing(tmp_path: Path) -> None:
    prepared = _prepared(calibrated=False)
    qtrace.set_phase(prepared, "observe")
    prepared(X)
    qtrace.save(prepared, tmp_path / "m.mge")
    loaded = qtrace.load(tmp_path / "m.mge")
    for batch in BATCHES[1:]:
        prepared(mge.Tensor(batch))
        loaded(mge.Tensor(batch))
    expected = [f.observer.qparams() for f in fake_quants(prepared)]
    assert [f.observer.qparams() for f in fake_quants(loaded)] == expected


@pytest.mark.quick(1)
@pytest.mark.parametrize("fold", [True, False])
def test_names_that_are_numbers_or_builtins(fold: bool, tmp_path: Path) -> None:
    inner = net(lambda self, x: self.max(self.filter(x)), filter=M.Conv2d(4, 4, 1), max=M.ReLU())
    layers = (M.Conv2d(3, 4, 1), M.BatchNorm2d(4), inner, M.Conv2d(4, 2, 1, bias=False))
    module = randomize(M.Sequential(*layers))
    prepared = qtrace.prepare(qtrace.trace(module, BATCHES[0]), QConfig(qat={"bn": {"fold": fold}}))
    qtrace.calibrate(prepared, BATCHES, progress=False)
    qtrace.save(prepared, tmp_path / "m.mge")
    converted = qtrace.convert(qtrace.load(tmp_path / "m.mge"))
    np.testing.assert_array_equal(converted(X).numpy(), prepared(X).numpy())
    assert qtrace.verify(qtrace.export(converted, tmp_path / "m.onnx"), converted, BATCHES).passed


# -- several inputs ------------------------------------------------------------------------------------


def test_several_inputs_by_position_and_by_name(tmp_path: Path) -> None:
    module = net(
        lambda self, left, right: self.a(left) * F.sigmoid(self.b(right)),
        a=M.Conv2d(3, 4, 1),
        b=M.Conv2d(3, 4, 1),
    )
    left, right = images(2, *SHAPE, seed=1), images(2, *SHAPE, seed=2)
    traced = qtrace.trace(module, left, right)
    by_position = qtrace.calibrate(qtrace.prepare(traced), [(left, right)], progress=False)
    by_name = qtrace.calibrate(qtrace.prepare(traced), [{"right": right, "left": left}], progress=False)
    assert [f.qparams() for f in fake_quants(by_position)] == [f.qparams() for f in fake_quants(by_name)]
    converted = qtrace.convert(by_name)
    path = qtrace.export(converted, tmp_path / "m.onnx")
    assert qtrace.verify(path, converted, [{"right": right, "left": left}]).passed


def test_errors_are_one_sentence_without_internals() -> None:
    with pytest.raises(QtraceError) as caught:
        qtrace.convert(_prepared(calibrated=False))
    assert "\n" not in str(caught.value)

"""Numbers that stand for infinity take no integers from the values beside them, however they are written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import qtrace
from qtrace.comparing.sums import sqnr_db
from qtrace.errors import CalibrationError
from qtrace.graph.types import TracedModule
from qtrace.preparation.model import fake_quants
from qtrace.preparation.passes import _infinity
from qtrace.preparation.passes._infinity import Infinity, infinity_of
from tests.each import each_of
from tests.nets import images, net

T = 6
INF = float("inf")
LATER = np.triu(np.ones((1, T, T), np.float32), 1)
LOWEST = float(np.finfo(np.float32).min)
HALF = float(np.finfo(np.float16).min)


def _mask(value: float) -> np.ndarray:
    return np.where(LATER > 0, np.float32(value), np.float32(0))


def _set(value: float) -> Callable[..., mge.Tensor]:
    def fill(self: M.Module, scores: mge.Tensor) -> mge.Tensor:
        scores = scores * 1.0
        scores[:, :, 4:] = value
        return scores

    return fill


def _joined(value: float) -> Callable[..., mge.Tensor]:
    return lambda self, s: F.concat([s[:, :, : T - 1], F.full((s.shape[0], T, 1), value)], axis=2)


Spelling = tuple[Callable[..., mge.Tensor], dict[str, Any], "np.ndarray | None"]
SPELLINGS: dict[str, Callable[[float], Spelling]] = {
    "parameter": lambda v: (lambda self, s: s + self.mask, {"mask": mge.Parameter(_mask(v))}, None),
    "buffer": lambda v: (lambda self, s: s + self.mask, {"mask": mge.Tensor(_mask(v))}, None),
    "subtraction": lambda v: (lambda self, s: s - self.mask, {"mask": mge.Tensor(_mask(-v))}, None),
    "sliced": lambda v: (lambda self, s: s + self.mask[:, :T, :T], {"mask": mge.Tensor(_mask(v))}, None),
    "scaled": lambda v: (lambda self, s: (s * 2 + self.mask) * 0.5, {"mask": mge.Tensor(_mask(v))}, None),
    "where": lambda v: (
        lambda self, s, m: F.where(F.broadcast_to(m, s.shape) > 0, F.full_like(s, v), s),
        {},
        LATER,
    ),
    "filled": lambda v: (
        lambda self, s, m: F.where(F.broadcast_to(m, s.shape) > 0, F.full(s.shape, v), s),
        {},
        LATER,
    ),
    "product": lambda v: (lambda self, s, m: s + (1 - m) * v, {}, 1 - LATER),
    "product of ones less": lambda v: (lambda self, s, m: s - (m - 1) * v, {}, 1 - LATER),
    "computed": lambda v: (lambda self, s: s + (1 - self.m) * v, {"m": mge.Tensor(1 - LATER)}, None),
    "maximum": lambda v: (lambda self, s, m: F.maximum(s + (1 - m) * v, v), {}, 1 - LATER),
    "clip": lambda v: (lambda self, s: F.clip(s + self.mask, v, -v), {"mask": mge.Tensor(_mask(v))}, None),
    "input": lambda v: (lambda self, s, m: s + m, {}, _mask(v)),
    "moved input": lambda v: (lambda self, s, m: s + F.squeeze(F.expand_dims(m, 1), 1), {}, _mask(v)),
    "concat": lambda v: (_joined(v), {}, None),
    "setitem": lambda v: (_set(v), {}, None),
}
FINITE = ("product", "product of ones less", "computed", "maximum", "clip")  # 0 * inf is NaN


def _attend(spelling: Spelling) -> tuple[M.Module, tuple[np.ndarray, ...]]:
    apply, children, given_mask = spelling

    def forward(self: M.Module, x: mge.Tensor, *masks: mge.Tensor) -> mge.Tensor:
        scores = F.matmul(self.q(x), self.k(x), transpose_b=True) * 2.0
        scores = apply(self, scores, *masks)
        return self.out(F.matmul(F.softmax(scores, axis=-1), self.v(x)))

    layers = {name: M.Linear(8, 8) for name in ("q", "k", "v", "out")}
    x = np.random.default_rng(0).normal(size=(2, T, 8)).astype(np.float32)
    masks = () if given_mask is None else (np.repeat(given_mask, 2, 0),)
    return net(forward, **layers, **children), (x, *masks)


def _sqnr(expected: Any, actual: Any) -> float:
    expected, actual = (np.asarray(a.numpy(), np.float64) for a in (expected, actual))
    return float(10 * np.log10(np.square(expected).sum() / np.square(expected - actual).sum()))


def _largest_scale(prepared: TracedModule) -> float:
    return max(float(fq.scale.numpy().max()) for fq in fake_quants(prepared))


@pytest.mark.parametrize("value", [-1e4, -INF])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_mask_before_a_softmax_leaves_the_scores_their_integers(spelling: str, value: float) -> None:
    if value == -INF and spelling in FINITE:
        pytest.skip("0 * inf is NaN")
    if spelling in ("maximum", "subtraction", "clip") and value == LOWEST:
        value = -1e9  # sums beyond float32 are infinite
    model, batch = _attend(SPELLINGS[spelling](value))
    traced = qtrace.trace(model, *batch, check=False)
    prepared = qtrace.prepare(traced, {"placement": "everything", "rules": _ROUND_SOFTMAX})
    prepared = qtrace.calibrate(prepared, [batch], progress=False)
    arguments = tuple(map(mge.Tensor, batch))
    assert _sqnr(model(*arguments), prepared(*arguments)) > 28
    assert _largest_scale(prepared) < 1


_ROUND_SOFTMAX = [{"match": {"op": "softmax"}, "quantize": True}]


@pytest.mark.parametrize("value", [-100.0, -65504.0, HALF, -1e9])
def test_every_way_of_quantizing_keeps_the_scores(value: float) -> None:
    model, batch = _attend(SPELLINGS["parameter"](value))
    traced = qtrace.trace(model, *batch, check=False)
    arguments = tuple(map(mge.Tensor, batch))
    for recipe in (None, "vit", "backend/tflite", "backend/qnn"):
        prepared = qtrace.calibrate(qtrace.prepare(traced, recipe), [batch], progress=False)
        assert _sqnr(model(*arguments), prepared(*arguments)) > 28, recipe


READERS: dict[str, tuple[Callable[[mge.Tensor], mge.Tensor], float]] = {
    "max pooling": (lambda x: F.max_pool2d(x, 3, 2), -1.0),
    "max": (lambda x: F.max(x, axis=3, keepdims=True), -1.0),
    "negated max pooling": (lambda x: -F.max_pool2d(x, 3, 2), -1.0),
    "min": (lambda x: F.min(x, axis=3, keepdims=True), 1.0),
    "max of all": (lambda x: F.max(F.transpose(x, (0, 1, 3, 2)), axis=2, keepdims=True), -1.0),
}
PADDINGS: dict[str, Callable[[mge.Tensor, float], mge.Tensor]] = {
    "pad": lambda x, v: F.nn.pad(x, ((0, 0), (0, 0), (0, 0), (0, 1)), constant_value=v),
    "module": lambda x, v: M.Pad(((0, 0), (0, 0), (0, 0), (0, 1)), constant_val=v)(x),
    "concat": lambda x, v: F.concat([x, F.full((x.shape[0], 4, x.shape[2], 1), v)], axis=3),
    "where": lambda x, v: F.where(F.abs(x) > 0.05, x, F.full_like(x, v)),
}


@pytest.mark.parametrize("value", [1e4, -LOWEST])
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("padding", PADDINGS)
def test_a_maximum_reads_no_range_of_a_padding(padding: str, reader: str, value: float) -> None:
    read, sign = READERS[reader]
    model = net(
        lambda self, x: self.b(read(PADDINGS[padding](self.a(x), sign * value))),
        a=M.Conv2d(3, 4, 1),
        b=M.Conv2d(4, 4, 1),
    )
    batch = images(2, 3, 8, 8)
    traced = qtrace.trace(model, batch, check=False)
    prepared = qtrace.calibrate(qtrace.prepare(traced, "megengine"), [batch], progress=False)
    x = mge.Tensor(batch)
    assert _sqnr(model(x), prepared(x)) > 28
    assert _largest_scale(prepared) < 1
    if padding == "pad":
        notes = {n.kind: n.state for n in qtrace.explain(prepared).annotation.notes}
        assert notes["pad"] == "carried"
        call = next(e for e in qtrace.convert(prepared).graph._exprs if "pad" in str(e.outputs[0].name))
        assert abs(dict(zip(("x", "width", "mode", "value"), call.args, strict=True))["value"]) < 10


def _pooled(path: Path, relu: bool, **attributes: Any) -> None:
    rng = np.random.default_rng(0)
    stored = {
        "w1": rng.normal(size=(8, 3, 3, 3)).astype(np.float32) / 4,
        "w2": rng.normal(size=(4, 8, 1, 1)).astype(np.float32) / 3,
    }
    nodes = [helper.make_node("Conv", ["x", "w1"], ["a"], pads=[1, 1, 1, 1])]
    nodes += [helper.make_node("Relu", ["a"], ["r"])] if relu else []
    nodes.append(helper.make_node("MaxPool", ["r" if relu else "a"], ["p"], **attributes))
    nodes.append(helper.make_node("Conv", ["p", "w2"], ["y"]))
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", 1, [2, 3, 16, 16])],
        [helper.make_tensor_value_info("y", 1, None)],
        [numpy_helper.from_array(v, n) for n, v in stored.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


TARGETS = {
    "int8": "m.onnx",
    "backend/tflite": "m.tflite",
    "backend/ncnn": "m.param",
    "backend/openvino": "m.onnx",
    "backend/qnn": "m.onnx",
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("relu", "attributes"),
    [
        (True, {"auto_pad": "SAME_UPPER"}),
        (False, {"pads": [0, 0, 1, 1]}),
        (False, {"auto_pad": "SAME_LOWER"}),
    ],
)
def test_a_max_pooling_with_unequal_pads_runs_on_integers(
    relu: bool, attributes: dict[str, Any], target: str, tmp_path: Path
) -> None:
    _pooled(tmp_path / "net.onnx", relu, kernel_shape=[3, 3], strides=[2, 2], **attributes)
    traced, batch = qtrace.from_onnx(tmp_path / "net.onnx"), images(2, 3, 16, 16)
    prepared = qtrace.calibrate(qtrace.prepare(traced, target), [batch], progress=False)
    x = mge.Tensor(batch)
    assert _sqnr(_only(traced(x)), _only(prepared(x))) > 35
    converted = qtrace.convert(prepared)
    qtrace.export(converted, tmp_path / TARGETS[target])
    report = qtrace.verify(tmp_path / TARGETS[target], converted, [batch])
    assert report.passed, report.table()


def _only(value: Any) -> Any:
    return value[0] if isinstance(value, (tuple, list)) else value


def test_numbers_of_a_continuous_range_count_for_themselves() -> None:
    assert infinity_of(np.arange(-30000, 30000, dtype=np.float32)) is Infinity.NONE
    assert infinity_of(np.array([0.0, 1.0, -1e4])) is Infinity.LOW
    assert infinity_of(np.array([0.0, -INF, INF, np.nan])) is Infinity.LOW | Infinity.HIGH | Infinity.NAN
    model = net(lambda self, x: self.c((x - 32768.0) / 32768.0), c=M.Conv2d(3, 2, 1))
    traced = qtrace.trace(model, images(1, 3, 4, 4) * 65535, check=False)
    notes = qtrace.explain(qtrace.prepare(traced, "megengine")).annotation.notes
    assert not any("infinity" in note.reason for note in notes)


def test_a_fault_in_the_search_for_infinity_surfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(*_: object) -> Infinity:
        raise TypeError("a fault")

    model, batch = _attend(SPELLINGS["parameter"](-1e9))
    traced = qtrace.trace(model, *batch, check=False)
    monkeypatch.setattr(_infinity._Finder, "_judge", faulty)
    with pytest.raises(TypeError, match="^a fault$") as fault:
        qtrace.prepare(traced, "megengine")
    assert fault.traceback[-1].name == "faulty"


@pytest.mark.parametrize("algorithm", ["reparameterize", "equalize", "smooth"])
def test_algorithms_that_change_weights_leave_masks_alone(algorithm: str) -> None:
    model, batch = _attend(SPELLINGS["parameter"](-1e9))
    traced = qtrace.trace(model, *batch, check=False)
    prepared = qtrace.prepare(traced, {"ptq": [algorithm]}, samples=[batch])
    prepared = qtrace.calibrate(prepared, [batch], progress=False)
    arguments = tuple(map(mge.Tensor, batch))
    assert _sqnr(model(*arguments), prepared(*arguments)) > 28


@pytest.mark.parametrize("algorithm", ["reparameterize", "equalize"])
def test_algorithms_that_change_weights_keep_paddings_of_a_maximum(algorithm: str) -> None:
    model = net(
        lambda self, x: self.b(F.max_pool2d(PADDINGS["pad"](self.a(x) * 0.5, LOWEST), 3, 2)),
        a=M.Conv2d(3, 4, 1),
        b=M.Conv2d(4, 4, 1),
    )
    model.a.weight[0] *= 30.0
    batch = images(2, 3, 8, 8)
    prepared = qtrace.prepare(qtrace.trace(model, batch, check=False), {"ptq": [algorithm]})
    prepared = qtrace.calibrate(prepared, [batch], progress=False)
    assert _sqnr(model(mge.Tensor(batch)), prepared(mge.Tensor(batch))) > 28
    assert _largest_scale(prepared) < 10


def test_absorption_adds_no_number_that_stands_for_infinity_to_a_layer() -> None:
    model = net(
        lambda self, x: F.softmax(self.a(x) + self.mask, axis=-1),
        a=M.Linear(8, T),
        mask=mge.Parameter(np.array([0, 0, 0, 0, -1e9, -1e9], np.float32)),
    )
    batch = images(2, T, 8)
    prepared = qtrace.prepare(qtrace.trace(model, batch, check=False))
    prepared = qtrace.calibrate(prepared, [batch], progress=False)
    assert _sqnr(model(mge.Tensor(batch)), prepared(mge.Tensor(batch))) > 28
    assert _largest_scale(prepared) < 1


_CONSTANT = np.array([[True, False, True, True]])
_NOTHING = mge.Tensor(np.full((1, 4), np.nan, np.float32))


def _fill(self: M.Module, y: mge.Tensor, mask: Any, value: Any) -> mge.Tensor:
    return F.where(F.broadcast_to(mask, y.shape), y, F.broadcast_to(value, y.shape))


MISSING: dict[str, Callable[..., mge.Tensor]] = {
    "constant mask": lambda self, x: _fill(self, self.a(x), mge.Tensor(_CONSTANT), self.nothing),
    "computed mask": lambda self, x: _fill(self, (y := self.a(x)), y > 0, self.nothing),
    "number": lambda self, x: F.where((y := self.a(x)) > 0, y, F.full_like(y, float("nan"))),
    "scaled": lambda self, x: _fill(self, (y := self.a(x)), y > 0, self.nothing) * 2.0 + 1.0,
    "moved": lambda self, x: F.concat([self.a(x), _fill(self, (y := self.b(x)), y > 0, self.nothing)], 1)[
        :, 2:
    ],
    "input": lambda self, x: self.a(F.where(F.isnan(x), F.zeros_like(x), x)),
    "scaled input": lambda self, x: self.a(F.where(F.isnan(z := x * 0.5), F.zeros_like(z), z)),
    "compared input": lambda self, x: self.a(F.where(F.equal(x, x), x, F.zeros_like(x))),
    "input filled in": lambda self, x: _fill(
        self, self.a(F.where(F.isnan(x), F.zeros_like(x), x)), mge.Tensor(_CONSTANT), x[:, 2:6]
    ),
}


@each_of("case", MISSING)
def test_nan_that_means_no_value_is_as_in_float(case: str, tmp_path: Path) -> None:
    module = net(MISSING[case], a=M.Linear(8, 4), b=M.Linear(8, 4), nothing=_NOTHING)
    batches = [np.random.default_rng(seed).normal(size=(8, 8)).astype(np.float32) for seed in range(3)]
    if "input" in case:
        for batch in batches:
            batch[::2, ::3] = np.nan
    traced = qtrace.trace(module, batches[0], check=False)
    config = {"backend": "onnxruntime", "placement": "everything", "ptq": ["gptq"]}
    prepared = qtrace.prepare(traced, config, samples=batches)
    qtrace.calibrate(prepared, batches, progress=False)
    exact, rounded = (graph(mge.Tensor(batches[1])).numpy() for graph in (traced, prepared))
    assert np.isnan(exact).any() == (case not in ("input", "scaled input", "compared input"))
    np.testing.assert_array_equal(np.isnan(exact), np.isnan(rounded))
    assert sqnr_db(exact, rounded) > 30
    comparison = qtrace.compare(prepared, batches)
    assert comparison.outputs[0].sqnr_db > 30
    converted = qtrace.convert(prepared)
    qtrace.export(converted, tmp_path / "m.onnx")
    assert qtrace.verify(tmp_path / "m.onnx", converted, batches).passed


@each_of("layer", ["weight", "bias", "data", "sum"])
def test_nan_that_a_layer_makes_or_spreads_stays_an_error(layer: str) -> None:
    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        z = F.where(x > 3, F.full_like(x, float("nan")), x) if layer == "data" else x
        y = self.b(F.relu(self.a(x)))
        return F.concat([y, F.sum(z / 0 * 0, 1, True) if layer == "sum" else F.linear(z, self.c.weight)], 1)

    module = net(forward, a=M.Linear(8, 8), b=M.Linear(8, 4), c=M.Linear(8, 4))
    x = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    x[0, 0] = 4.0
    prepared = qtrace.prepare(
        qtrace.trace(module, x, check=False),
        {"rules": [{"match": {"name": ["linear_out"]}, "quantize": False, "optional": True}]},
    )
    if layer in ("weight", "bias"):
        parameter = dict(prepared.named_parameters())[f"b.{layer}"]
        parameter._reset(mge.Parameter(np.full(parameter.shape, np.nan, np.float32)))
    with pytest.raises(CalibrationError, match="holds NaN"):
        qtrace.calibrate(prepared, [x], progress=False)


@each_of("reader", [F.relu, lambda x: x > 0, lambda x: F.maximum(x, 0.0)], ids=repr)
def test_nan_in_the_data_that_the_graph_does_not_ask_for_is_refused(reader: Callable[..., Any]) -> None:
    module = net(lambda self, x: self.a(reader(x).astype("float32")), a=M.Linear(8, 4))
    x = np.ones((2, 8), np.float32)
    traced = qtrace.trace(module, x, check=False)
    x[1, 2] = np.nan
    with pytest.raises(CalibrationError, match=r"batch 0 holds NaN.* at \[1, 2\] .*F\.isnan"):
        qtrace.prepare(traced, "onnxruntime", samples=[x])

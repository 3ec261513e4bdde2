"""What a trace leaves out or warns of: None among results, attention in parts, NaN from finite inputs."""

from __future__ import annotations

import functools
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest
from megengine.core._imperative_rt.core2 import apply
from megengine.core.tensor.utils import subgraph

import qtrace
from qtrace.errors import QtraceWarning, TraceError
from qtrace.graph.flatten import flatten
from tests.each import each_of
from tests.nets import images, net

IMAGE = images(2, 3, 8, 8)
TOKENS = np.random.default_rng(0).normal(size=(2, 5, 8)).astype(np.float32)


# -- None among what forward returns -------------------------------------------------------------------


class Logits(M.Module):
    """Returns a loss beside its result, which is None without targets."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = M.Linear(8, 4)

    def forward(self, x: mge.Tensor, targets: mge.Tensor | None = None) -> tuple[Any, ...]:
        y = self.fc(x)
        return y, None if targets is None else F.mean(y - targets)


RESULTS: dict[str, Callable[[mge.Tensor], Any]] = {
    "tuple": lambda x: (x, None),
    "list": lambda x: [None, x, [None, x + 1]],
    "dict": lambda x: OrderedDict(first=None, second=x, last={"inner": None, "kept": x * 2}),
}


@pytest.mark.parametrize("kind", RESULTS)
def test_trace_drops_none_from_results_with_a_warning(kind: str, tmp_path: Path) -> None:
    module = net(lambda self, x: RESULTS[kind](self.fc(x)), fc=M.Linear(8, 8))
    with pytest.warns(QtraceWarning, match="returns None among tensors: the trace returns only the tensors"):
        traced = qtrace.trace(module, TOKENS)
    qtrace.save(traced, tmp_path / "m.mge")
    y = module.fc(mge.Tensor(TOKENS)).numpy()
    for model in (traced, flatten(traced), qtrace.load(tmp_path / "m.mge")):
        result = model(mge.Tensor(TOKENS))
        if kind == "tuple":
            assert isinstance(result, tuple)
            (value,) = result
        elif kind == "list":
            value, (other,) = result
            np.testing.assert_allclose(other.numpy(), y + 1, rtol=1e-6)
        else:
            assert list(result) == ["second", "last"]
            value = result["second"]
            np.testing.assert_allclose(result["last"]["kept"].numpy(), y * 2, rtol=1e-6)
        np.testing.assert_allclose(value.numpy(), y, rtol=1e-6)


def test_a_submodule_that_returns_none_is_traced_without_a_word() -> None:
    module = net(lambda self, x: F.relu(self.inner(x)[0]), inner=Logits())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        traced = qtrace.trace(module, TOKENS)
    x = mge.Tensor(TOKENS)
    np.testing.assert_allclose(traced(x).numpy(), module(x).numpy(), rtol=1e-6)


def test_a_submodule_that_returns_none_twice() -> None:
    module = net(lambda self, x: self.inner(x)[0] + self.inner(x * 2)[0], inner=Logits())
    traced, x = qtrace.trace(module, TOKENS), mge.Tensor(TOKENS)
    np.testing.assert_allclose(flatten(traced)(x).numpy(), module(x).numpy(), rtol=1e-6)


def test_a_forward_that_returns_nothing_is_refused() -> None:
    with pytest.raises(TraceError, match="may only return Tensors"):
        qtrace.trace(net(lambda self, x: None), TOKENS)


def _with_numbers(self: M.Module, x: mge.Tensor) -> Any:
    """Returns as RIFE's IFNet does: lists of tensors, tensors, None and a loss that is the number 0."""
    y = self.fc(x)
    return {"scale": 2, "outputs": [y, y + 1], "name": "flow", "a": y * 2, "none": None, "loss": 0.0}


def test_numbers_are_left_out_of_the_result() -> None:
    module = net(_with_numbers, fc=M.Linear(8, 8))
    with pytest.warns(QtraceWarning, match="Python values among tensors, such as numbers: the trace returns"):
        traced = qtrace.trace(module, TOKENS)
    result, expected = flatten(traced)(mge.Tensor(TOKENS)), module(mge.Tensor(TOKENS))
    assert list(result) == ["outputs", "a"]
    for value, other in zip(
        [*result["outputs"], result["a"]], [*expected["outputs"], expected["a"]], strict=True
    ):
        np.testing.assert_allclose(value.numpy(), other.numpy(), rtol=1e-6)


def test_results_beside_numbers_keep_their_order() -> None:
    module = net(lambda self, x: [3, {"z": x, "a": x * 2}, np.zeros(4), "flow"])
    with pytest.warns(QtraceWarning, match="Python values among tensors"):
        traced = qtrace.trace(module, TOKENS)
    (result,) = traced(mge.Tensor(TOKENS))
    assert list(result) == ["z", "a"]


def test_a_submodule_may_return_numbers_among_tensors_or_alone() -> None:
    inner = net(lambda self, x: (x * 2, 3, {"power": 2.0, "x": x + 1}))
    alone = net(lambda self, x: 0.5)

    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        y, times, more = self.inner(x)
        return y * times + more["x"] ** more["power"] * self.alone(x)

    module = net(forward, inner=inner, alone=alone)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        traced = qtrace.trace(module, TOKENS)
    x = mge.Tensor(TOKENS + 1)
    np.testing.assert_allclose(flatten(traced)(x).numpy(), module(x).numpy(), rtol=1e-6)


# -- attention -----------------------------------------------------------------------------------------


def _attention(**options: Any) -> M.Module:
    layer = M.MultiHeadAttention(8, 2, **options)
    rng = np.random.default_rng(1)
    layer.io_weight_bias._reset(
        mge.Parameter(rng.normal(size=layer.io_weight_bias.shape).astype(np.float32) * 0.3)
    )
    layer.eval()
    return layer


_MASK = np.random.default_rng(2).random((5, 5)) > 0.6
_MASK[:, 0] = False
_PADDING = np.array([[False] * 4 + [True], [False] * 5])

CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "boolean mask": {"attn_mask": _MASK},
    "float mask": {"attn_mask": np.random.default_rng(3).normal(size=(5, 5)).astype(np.float32)},
    "a mask for each head": {"attn_mask": np.random.default_rng(3).normal(size=(4, 5, 5)).astype(np.float32)},
    "padding": {"key_padding_mask": _PADDING},
    "both": {"attn_mask": _MASK, "key_padding_mask": _PADDING},
    "weights": {"need_weights": True},
    "mean weights": {"need_weights": True, "average_attn_weights": True},
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("case", CALLS)
def test_attention_is_traced_in_parts(case: str, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # MegEngine writes boolean masks by y[mask] = number, which gives garbage where ops are queued.
    monkeypatch.setattr(mge.config, "async_level", 0)
    layer = _attention(bias=bias)
    arguments = {k: mge.Tensor(v) if isinstance(v, np.ndarray) else v for k, v in CALLS[case].items()}
    module = net(lambda self, x: [v for v in self.layer(x, x, x, **arguments) if v is not None], layer=layer)
    layer.io_weight_bias._reset(_attention(bias=bias).io_weight_bias)
    traced, x = qtrace.trace(module, TOKENS), mge.Tensor(TOKENS)
    for output, expected in zip(flatten(traced)(x), module(x), strict=True):
        np.testing.assert_allclose(output.numpy(), expected.numpy(), rtol=1e-4, atol=1e-6)
    assert [n for n, _ in traced.named_parameters()] == ["layer.io_weight_bias"]


def test_attention_is_saved_quantized_and_exported(tmp_path: Path) -> None:
    layer = _attention()
    module = net(lambda self, x: self.last(self.layer(x, x, x)[0]), layer=layer, last=M.Linear(8, 8))
    layer.io_weight_bias._reset(_attention().io_weight_bias)
    qtrace.save(qtrace.trace(module, TOKENS), tmp_path / "m.mge")
    prepared = qtrace.prepare(qtrace.load(tmp_path / "m.mge"))
    converted = qtrace.convert(qtrace.calibrate(prepared, [TOKENS], progress=False))
    path = qtrace.export(converted, tmp_path / "m.onnx")
    report = qtrace.verify(path, converted, [TOKENS], min_sqnr_db=20)
    assert report.passed, report.table()
    assert report.worst_lsb() == 0


def test_attention_alone_is_traced() -> None:
    layer = _attention()
    with pytest.warns(QtraceWarning, match="returns None among tensors"):
        traced = qtrace.trace(layer, TOKENS, TOKENS, TOKENS)
    x = mge.Tensor(TOKENS)
    np.testing.assert_allclose(traced(x, x, x)[0].numpy(), layer(x, x, x)[0].numpy(), rtol=1e-4, atol=1e-6)


# -- ops that are compiled from others -----------------------------------------------------------------


@functools.cache
def _outer_op(dtype: Any, device: Any) -> Any:
    @subgraph("OuterProduct", dtype, device, 1)
    def outer(inputs: Any, f: Any, c: Any) -> Any:
        (x,) = inputs
        return (f("*", x, x),), (True,)

    return outer


def _square(x: mge.Tensor) -> mge.Tensor:
    return apply(_outer_op(x.dtype, x.device)(), x)[0]  # of a function like einsum


def test_an_op_compiled_from_others_is_refused_with_its_line() -> None:
    module = net(lambda self, x: F.relu(_square(self.fc(x))), fc=M.Linear(8, 8))
    line = next(n for n, t in enumerate(Path(__file__).read_text().splitlines(), 1) if "like einsum" in t)
    with pytest.raises(TraceError) as caught:
        qtrace.trace(module, TOKENS)
    message = str(caught.value)
    assert f"outerproduct_out (OuterProduct, tests/graph/tracing/test_notes.py:{line})" in message
    assert "write it with functions of megengine.functional" in message


# -- NaN and infinity from finite inputs ---------------------------------------------------------------


def _low(self: Any, x: mge.Tensor) -> mge.Tensor:
    y = self.fc(x) * 0 - 95
    return F.maximum(F.softmax(y, axis=-1), 0.0)  # on CPU, maximum swallows NaN


def test_the_softmax_that_gives_nan_is_named_at_trace() -> None:
    line = next(n for n, t in enumerate(Path(__file__).read_text().splitlines(), 1) if "swallows NaN" in t)
    with pytest.warns(QtraceWarning) as caught:
        qtrace.trace(net(_low, fc=M.Linear(8, 8)), TOKENS)
    (text,) = (str(w.message) for w in caught if w.category is QtraceWarning)
    assert f"softmax_out (F.softmax, tests/graph/tracing/test_notes.py:{line}) gives NaN" in text
    assert "F.softmax(x - F.max(x, axis, keepdims=True), axis)" in text


def test_the_proposed_softmax_is_equal_and_finite() -> None:
    values = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32) * 30
    for shift in (0.0, -300.0):
        x = mge.Tensor(values + np.float32(shift))
        found = F.softmax(x - F.max(x, 1, keepdims=True), 1).numpy()
        exact = np.exp((values + np.float32(shift)).astype(np.float64))
        wide = values.astype(np.float64) + shift
        exact = np.exp(wide - wide.max(1, keepdims=True))
        np.testing.assert_allclose(found, exact / exact.sum(1, keepdims=True), atol=1e-5)


@pytest.mark.parametrize("top", [-87.3, -87.4])
def test_where_softmax_of_megengine_gives_nan(top: float) -> None:
    """The fact that the documents state: NaN where the largest value is below ln(1.18e-38) = -87.34."""
    result = F.softmax(mge.Tensor(np.array([[top, top - 20]], np.float32)), 1).numpy()
    assert np.isnan(result).all() == (top < -87.34)


def test_infinity_is_named_too() -> None:
    module = net(lambda self, x: F.log(F.relu(self.fc(x)) * 0), fc=M.Linear(8, 8))
    with pytest.warns(QtraceWarning, match=r"log_out \(F.log, .*\) gives infinity for finite inputs"):
        qtrace.trace(module, TOKENS)


_CHANGING = [F.sigmoid, F.relu, F.relu6, F.exp, lambda y: F.maximum(y, 0.0), lambda y: F.clip(y, -1.0, 1.0)]


@pytest.mark.parametrize(
    "op",
    [*_CHANGING, M.ReLU(), F.tanh, F.nn.silu, F.softplus, lambda y: y * 2.0],
    ids=str.split("sigmoid relu relu6 exp maximum clip ReLU tanh silu softplus twice"),
)
def test_an_op_that_gives_numbers_for_nan_that_is_meant_is_named(op: Callable[..., mge.Tensor]) -> None:
    def forward(self: Any, x: mge.Tensor) -> mge.Tensor:
        y = self.fc(x)
        return op(F.where(y > 0, y, F.full_like(y, float("nan"))))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        traced = qtrace.trace(net(forward, fc=M.Linear(8, 8), op=op), TOKENS)
    named = ["gives numbers for NaN in MegEngine on CPU" in str(w.message) for w in caught]
    nan = np.isnan(traced(mge.Tensor(TOKENS)).numpy())
    assert named == ([True] if nan.mean() < 0.2 else [])  # about half of the values are "no value"


@pytest.mark.parametrize("check", [True, False])
def test_trace_does_not_warn_of_infinite_masks(check: bool) -> None:
    def forward(self: Any, x: mge.Tensor) -> mge.Tensor:
        y = self.fc(x)
        mask = F.full(y.shape, float("-inf"), dtype="float32")
        return F.softmax(F.where(y > 0, y, mask) * 1.0 + 0, axis=-1) + F.softmax(y, axis=-1)

    with warnings.catch_warnings():
        warnings.simplefilter("error", QtraceWarning)
        qtrace.trace(net(forward, fc=M.Linear(8, 8)), np.abs(TOKENS) + 5, check=check)


def test_calibration_names_op_and_line() -> None:
    module = net(lambda self, x: self.fc(F.softmax(x, axis=-1) + 0.5), fc=M.Linear(8, 8))
    prepared = qtrace.prepare(qtrace.trace(module, TOKENS))
    with pytest.raises(qtrace.errors.CalibrationError, match=r"softmax_out \(F.softmax, .*py:\d+\)"):
        qtrace.calibrate(prepared, [TOKENS * 0 - 95], progress=False)


# -- names of inputs -----------------------------------------------------------------------------------


def _many(
    self: M.Module, x: Any, scale: Any = None, mask: Any = None, pair: Any = None, last: Any = 2
) -> Any:
    y = self.fc(x) if scale is None else self.fc(x) * scale
    y = y if mask is None else y + mask
    return (y if pair is None else y * pair[1] + pair[0]["a"]) * last


@each_of(
    ("given", "names"),
    [
        ({"mask": TOKENS}, ["x", "mask"]),
        ({"pair": ({"a": TOKENS}, TOKENS), "mask": TOKENS}, ["x", "mask", "pair_0", "pair_1"]),
        ({"pair": ({"a": TOKENS, "b": None}, TOKENS)}, ["x", "pair_0", "pair_2"]),
        ({"last": TOKENS, "scale": TOKENS}, ["x", "scale", "last"]),
        ({"scale": 2.0, "last": TOKENS}, ["x", "last"]),
    ],
)
def test_inputs_behind_one_that_is_left_out_keep_their_names(given: dict[str, Any], names: list[str]) -> None:
    module = net(_many, fc=M.Linear(8, 8))
    traced = qtrace.trace(module, TOKENS, **given)
    assert [node.name for node in traced.graph.inputs[1:]] == names
    assert [node.name for node in flatten(traced).graph.inputs[1:]] == names


def test_an_input_keeps_a_name_that_a_result_of_an_op_has() -> None:
    def forward(self: M.Module, x: Any, add_out: Any = None, mul_out: Any = None) -> Any:
        return (x + x) * x + mul_out

    traced = qtrace.trace(net(forward), TOKENS, mul_out=TOKENS)
    for model in (traced, flatten(traced)):
        assert [node.name for node in model.graph.inputs[1:]] == ["x", "mul_out"]


# -- comparisons of shapes -----------------------------------------------------------------------------


def _compares(self: M.Module, x: mge.Tensor) -> mge.Tensor:
    y = self.fc(x)
    assert y.shape == x.shape
    assert y.shape[:-1] == x.shape[:-1]
    if y.shape[1:] != x.shape[1:]:
        y = y * 5
    if y.shape != (1, 2, 3):
        y = y * 2
    if y.shape[-2:] == x.shape[:2]:
        y = y * 7
    return y + x if y.shape == x.shape else y


def test_shapes_are_compared_as_python_compares_them() -> None:
    module = net(_compares, fc=M.Linear(8, 8))
    traced, x = qtrace.trace(module, TOKENS), mge.Tensor(TOKENS)
    np.testing.assert_allclose(flatten(traced)(x).numpy(), module(x).numpy(), rtol=1e-6)


def test_values_are_not_compared_as_shapes_are() -> None:
    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        return x * 2 if bool((x == x).all()) else x

    with pytest.raises(TraceError, match="uses values of its data as Python values|fails on the example"):
        qtrace.trace(net(forward), TOKENS)

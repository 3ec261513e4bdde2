"""Constant factors and sums become part of the layers around them; the float output stays as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace import QConfig, ops
from qtrace.errors import ExportError
from qtrace.graph import exprs
from qtrace.preparation.model import read_record
from qtrace.preparation.normalize import normalize
from qtrace.preparation.passes.absorb import absorb
from qtrace.preparation.passes.base import PassResult
from tests.each import each_of
from tests.nets import net
from tests.preparation.passes.chains import absorbed

RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 4, 8, 8)).astype(np.float32)


def _conv(*args: Any, **options: Any) -> M.Conv2d:
    return M.Conv2d(*(args or (4, 4, 3)), **options)


def _numbers(*shape: int) -> mge.Parameter:
    return mge.Parameter(RNG.uniform(0.5, 2.0, shape).astype(np.float32))


def _kinds(traced: Any) -> list[str]:
    return [c.kind for e in exprs(traced) if (c := ops.read(e)) is not None]


def _through_concat(self: Any, x: Any) -> Any:
    parts = [F.flatten(self.a(x), 2), F.flatten(self.b(x[:, :, ::2, ::2]), 2)]
    return F.transpose(F.concat(parts, 2), (0, 2, 1)) * self.stride


STRIDES = mge.Tensor(np.repeat(np.float32([8.0, 16.0]), [36, 4]).reshape(1, 40, 1))

# name -> module, kinds of the graph afterwards
CASES: dict[str, tuple[M.Module, list[str]]] = {
    "article's head": (
        net(lambda self, x: F.relu(self.c(x) * self.scale) * 16, c=_conv(), scale=_numbers(1)),
        ["conv2d", "relu"],
    ),
    "through move and concat": (
        net(_through_concat, a=_conv(), b=_conv(), stride=STRIDES),
        ["conv2d", "flatten", "getitem", "conv2d", "flatten", "concat", "transpose"],
    ),
    "disjoint slices": (
        net(lambda self, x: self.tail(self.c(x)), c=_conv()),
        ["conv2d", "getitem", "getitem", "exp", "concat"],
    ),
    "split": (
        net(lambda self, x: _tail_of_split(self.c(x)), c=_conv()),
        ["conv2d", "split", "exp"],
    ),
    "max pool": (
        net(lambda self, x: F.max_pool2d(self.c(x), 3, 2, 1) * self.s - 1.5, c=_conv(), s=_numbers(4, 1, 1)),
        ["conv2d", "max_pool2d"],
    ),
    "mean pool that counts its padding": (
        net(lambda self, x: F.avg_pool2d(self.c(x), 3, 2, 1, mode="average") / 3, c=_conv()),
        ["conv2d", "avg_pool2d"],
    ),
    "mean": (net(lambda self, x: 2 - F.mean(self.c(x), (2, 3)), c=_conv()), ["conv2d", "mean"]),
    "sum, kept": (net(lambda self, x: -F.sum(self.c(x), 1, True), c=_conv()), ["conv2d", "sum"]),
    "mean, kept, of channels": (
        net(lambda self, x: F.mean(self.c(x), 2, True) * self.s, c=_conv(), s=_numbers(4, 1, 1)),
        ["conv2d", "mean"],
    ),
    "mean of a factor of channels": (
        net(lambda self, x: self.c(F.mean(x * self.s, 2, True)), c=_conv(4, 2, 1), s=_numbers(4, 1, 1)),
        ["mean", "conv2d"],
    ),
    "resize": (
        net(lambda self, x: F.nn.interpolate(self.c(x), (12, 12)) * 3 + 1, c=_conv()),
        ["conv2d", "interpolate"],
    ),
    "pad": (
        net(lambda self, x: F.nn.pad(self.c(x), ((0, 0), (0, 0), (1, 1), (2, 2))) * 4, c=_conv()),
        ["conv2d", "pad"],
    ),
    "shuffle": (
        net(
            lambda self, x: F.nn.pixel_shuffle(self.c(x), 2) * self.s,
            c=_conv(4, 8, 1),
            s=_numbers(1, 2, 1, 1),
        ),
        ["conv2d", "pixel_shuffle"],
    ),
    "norm before a conv": (
        net(lambda self, x: self.c(self.bn(x)), c=_conv(), bn=M.BatchNorm2d(4)),
        ["conv2d"],
    ),
    "norm before a grouped conv": (
        net(lambda self, x: self.c(self.bn(x)), c=_conv(4, 8, 3, groups=2, bias=False), bn=M.BatchNorm2d(4)),
        ["conv2d"],
    ),
    "factor before a padded conv": (
        net(lambda self, x: self.c(x * 0.5), c=_conv(4, 4, 3, padding=1)),
        ["conv2d"],
    ),
    "factor before a transposed conv": (
        net(lambda self, x: self.c(x * self.s), c=M.ConvTranspose2d(4, 6, 3, groups=2), s=_numbers(4, 1, 1)),
        ["conv_transpose2d"],
    ),
    "norm before max pool and linear": (
        net(
            lambda self, x: self.fc(F.flatten(F.max_pool2d(self.bn(x), 2), 1)),
            fc=M.Linear(64, 3),
            bn=M.BatchNorm2d(4),
        ),
        ["max_pool2d", "flatten", "linear"],
    ),
    "parts of a concat before convs": (
        net(
            lambda self, x: _two(F.concat([x * 3, F.relu(x * self.s)], 1), self.a, self.b),
            a=_conv(8, 4, 1),
            b=_conv(8, 2, 3, padding=1),
            s=_numbers(4, 1, 1),
        ),
        ["relu", "concat", "conv2d", "conv2d"],
    ),
    "mean before linear": (
        net(lambda self, x: self.fc(F.mean(x * self.s + 1, (2, 3))), fc=M.Linear(4, 3), s=_numbers(4, 1, 1)),
        ["mean", "linear"],
    ),
    "padding is not scaled": (
        net(lambda self, x: self.c(F.nn.pad(x / 255, ((0, 0), (0, 0), (1, 1), (1, 1))) + 1), c=_conv()),
        ["pad", "conv2d"],
    ),
}


NO_CONSTANT_OPS: dict[str, M.Module] = {
    "a mask of bools": net(lambda self, x: self.c(x) * (self.s > 1), c=_conv(4, 4, 1), s=_numbers(4, 1, 1)),
    "a number for more axes": net(
        lambda self, x: self.c(x) * self.s, c=_conv(4, 4, 1), s=_numbers(3, 1, 1, 1, 1)
    ),
    "a number that is not finite": net(lambda self, x: self.c(x) + float("inf"), c=_conv(4, 4, 1)),
    "a number over 0": net(
        lambda self, x: self.c(x) / self.s, c=_conv(4, 4, 1), s=mge.Parameter(np.float32([0.0]))
    ),
}


@each_of("name", NO_CONSTANT_OPS)
def test_absorb_leaves_ops_that_are_no_constants(name: str) -> None:
    flat = normalize(qtrace.trace(NO_CONSTANT_OPS[name], X, check=False))
    kinds = _kinds(flat)
    assert absorb(flat) == PassResult((), ())
    assert _kinds(flat) == kinds


def test_a_functional_norm_is_absorbed_if_its_numbers_are_parameters() -> None:
    def forward(self: Any, x: Any) -> Any:
        scale = F.exp(self.scale) if self.computed else self.scale
        return self.c(F.nn.batch_norm(x, self.mean, self.variance, scale, self.shift))

    def module(computed: bool) -> M.Module:
        numbers = {name: _numbers(1, 4, 1, 1) for name in ("mean", "variance", "scale", "shift")}
        return net(forward, c=_conv(4, 4, 1), computed=computed, **numbers)

    flat, result = absorbed(module(False), X)
    assert _kinds(flat) == ["conv2d"]
    assert result.changed
    kept = normalize(qtrace.trace(module(True), X, check=False))
    assert absorb(kept).changed == ()
    assert "batch_norm" in _kinds(kept)


def _two(x: Any, a: Any, b: Any) -> Any:
    return a(x), b(x)


def _tail_of_split(y: Any) -> Any:
    xy, wh = F.split(y, 2, axis=1)
    return xy * 8, F.exp(wh)


CASES["disjoint slices"][0].__class__.tail = lambda self, y: F.concat([y[:, :2] * 8 + 1, F.exp(y[:, 2:])], 1)


@each_of("name", CASES)
def test_absorb_takes_constants_into_the_layers_before_them(name: str) -> None:
    module, kinds = CASES[name]
    flat, result = absorbed(module, X)
    assert _kinds(flat) == kinds
    assert result.left == ()
    assert result.changed
    read = {e.name for e in exprs(flat) if type(e).__name__ == "GetAttr"}
    assert {n for n, _ in flat.named_parameters()} <= read


LEFT: dict[str, tuple[M.Module, str]] = {
    "norm before a padded conv": (
        net(lambda self, x: self.c(self.bn(x)), c=_conv(4, 4, 3, padding=1), bn=M.BatchNorm2d(4)),
        "c_out pads with 0, to which nothing is added",
    ),
    "sum before a transposed conv": (
        net(lambda self, x: self.c(x + 1), c=M.ConvTranspose2d(4, 4, 3)),
        "not every value of c_out is computed from as many of its inputs",
    ),
    "number over a tensor": (
        net(lambda self, x: (2 / self.c(x)) * 3, c=_conv()),
        "does not pass a factor on",
    ),
    "columns in a mean": (
        net(lambda self, x: self.c(F.mean(x * self.s, 3, True)), c=_conv(4, 2, 1), s=_numbers(1, 8)),
        "mixes elements with different numbers",
    ),
    "reflected columns": (
        net(
            lambda self, x: self.c(F.nn.pad(x * self.s, ((0, 0), (0, 0), (0, 0), (1, 1)), mode="reflect")),
            c=_conv(),
            s=_numbers(1, 8),
        ),
        "mixes elements with different numbers",
    ),
    "negative factor": (
        net(lambda self, x: F.relu(self.c(x)) * -2, c=_conv()),
        "passes no factor on that is negative or 0",
    ),
    "sum behind relu": (
        net(lambda self, x: F.relu(self.c(x)) + 2, c=_conv()),
        "relu_out (relu) passes no sum on",
    ),
    "sigmoid": (
        net(lambda self, x: F.sigmoid(self.c(x)) * 2, c=_conv()),
        "sigmoid_out (sigmoid) does not pass a factor on",
    ),
    "second reader": (net(lambda self, x: _both(self.c(x)), c=_conv()), "c_out is also read by exp_out"),
    "second output": (
        net(lambda self, x: _kept(self.c(x)), c=_conv()),
        "c_out is also an output of the graph",
    ),
    "overlapping slices": (
        net(lambda self, x: _overlapping(self.c(x)), c=_conv()),
        "c_out is also read by getitem_out",
    ),
    "columns": (
        net(lambda self, x: self.c(x) * self.s, c=_conv(), s=_numbers(1, 6)),
        "the numbers differ inside of it",
    ),
    "columns in a pool": (
        net(lambda self, x: F.max_pool2d(self.c(x), 2) * self.s, c=_conv(), s=_numbers(1, 3)),
        "max_pool2d_out (max_pool2d) mixes elements with different numbers",
    ),
    "padding with a number": (
        net(
            lambda self, x: F.nn.pad(self.c(x), ((0, 0), (0, 0), (1, 1), (1, 1)), constant_value=2.0) * 4,
            c=_conv(),
        ),
        "pad_out pads with 2",
    ),
    "mean pool that counts its padding": (
        net(lambda self, x: F.avg_pool2d(self.c(x), 3, 2, 1, mode="average") + 3, c=_conv()),
        "passes no sum on",
    ),
    "computed weight": (
        net(lambda self, x: F.conv2d(x, F.tanh(self.w)) * 2, w=_numbers(4, 4, 3, 3)),
        "is computed, not a parameter",
    ),
    "beside another value": (net(lambda self, x: (x * 2) * F.exp(x)), "reads it with other values"),
    "two ways": (
        net(lambda self, x: self.c(_twice(x * 2)), c=_conv(8, 4, 1)),
        "is met on two ways",
    ),
    "reduced to one number": (
        net(lambda self, x: F.sum(self.c(x) * self.s) * 2, c=_conv(4, 4, 1), s=_numbers(1, 8)),
        "the numbers differ inside of it",
    ),
    "beyond float32": (net(lambda self, x: self.c(x * 1e30) * 1e30, c=_conv()), "exceeds float32"),
}


def _twice(x: Any) -> Any:
    return F.concat([F.relu(x), x], 1) * 3


def _both(y: Any) -> Any:
    return y * 2, F.exp(y)


def _kept(y: Any) -> Any:
    return y * 2, y


def _overlapping(y: Any) -> Any:
    return F.exp(y[:, :2]), y[:, 1:] * 8


@each_of("name", LEFT)
def test_what_is_not_exact_is_left_with_the_reason(name: str) -> None:
    module, reason = LEFT[name]
    _, result = absorbed(module, X if name != "beyond float32" else X * 0)
    assert any(reason in str(left) for left in result.left), result.left


def _shared_head(self: Any, x: Any) -> Any:
    levels = [x, x[:, :, ::2, ::2]]
    return tuple(
        F.relu(self.c(y) * s) * stride for y, s, stride in zip(levels, (self.s, self.t), (8, 16), strict=True)
    )


def test_a_shared_head_gets_a_weight_for_each_scale() -> None:
    def head() -> M.Module:
        return net(_shared_head, c=_conv(), s=_numbers(1), t=_numbers(1))

    flat, result = absorbed(head(), X)
    assert result.left == ()
    assert sorted(n for n, _ in flat.named_parameters()) == [
        "c.bias",
        "c.bias_c_1_out",
        "c.weight",
        "c.weight_c_1_out",
    ]
    flat, result = absorbed(head(), X, copies=False)
    assert result.changed == ()
    assert "c.weight is shared with another layer" in str(result.left[0])


def _listed_scales(self: Any, x: Any) -> Any:
    levels = enumerate((x, x[:, :, ::2, ::2]))
    return tuple(F.relu(self.c(y) * self.scales[i]) * (8 << i) for i, y in levels)


def test_a_scale_that_is_an_entry_of_a_parameter_is_absorbed() -> None:
    flat, result = absorbed(net(_listed_scales, c=_conv(), scales=_numbers(2)), X)
    assert result.left == ()
    assert _kinds(flat) == ["getitem", "conv2d", "relu", "conv2d", "relu"]
    assert not hasattr(flat, "scales")


def test_one_factor_of_all_levels_changes_a_shared_weight_once() -> None:
    def forward(self: Any, x: Any) -> Any:
        return F.concat([F.flatten(self.c(y), 2) for y in (x, x[:, :, ::2, ::2])], 2) * 4

    flat, result = absorbed(net(forward, c=_conv()), X, copies=False)
    assert result.left == ()
    assert len(list(flat.named_parameters())) == 2


def test_the_statistics_of_a_layer_move_with_it() -> None:
    flat = normalize(qtrace.trace(net(lambda self, x: self.c(x) * -2 + 1, c=_conv()), X, check=False))
    result = absorb(flat, {"c_out": (np.ones(4), np.full(4, 0.5))})
    mean, deviation = result.norms["c_out"]
    assert (list(mean), list(deviation)) == ([-1.0] * 4, [1.0] * 4)


def test_prepare_absorbs_if_the_config_lists_it_and_reports_it() -> None:
    module = net(lambda self, x: F.relu(self.bn(self.c(x)) * 2) * 8, c=_conv(), bn=M.BatchNorm2d(4))
    traced = qtrace.trace(module, X, check=False)
    prepared = qtrace.prepare(traced, QConfig(ptq=["fuse_bn", "absorb"]))
    assert "mul" not in _kinds(prepared)
    expected = traced(mge.Tensor(X)).numpy()
    np.testing.assert_allclose(
        prepared(mge.Tensor(X)).numpy(), expected, rtol=0, atol=1e-5 * np.abs(expected).max()
    )
    (report,) = (r for r in read_record(prepared).ptq if r["algorithm"] == "absorb")
    assert report["changed"] == ["c_out: absorbed mul_out, mul_out_1"]
    assert "mul" in _kinds(qtrace.prepare(traced))


def test_prepare_says_so_if_there_is_nothing_to_absorb() -> None:
    prepared = qtrace.prepare(
        qtrace.trace(net(lambda self, x: self.c(x), c=_conv()), X, check=False), QConfig(ptq=["absorb"])
    )
    (report,) = read_record(prepared).ptq
    assert report["left"] == [{"site": "", "reason": "the graph has no op with stored numbers"}]


def test_a_kept_batch_norm_is_not_absorbed() -> None:
    module = net(lambda self, x: self.bn(self.c(x)), c=_conv(), bn=M.BatchNorm2d(4))
    config = QConfig(ptq=["fuse_bn", "absorb"], qat={"bn": {"fold": False}})
    prepared = qtrace.prepare(qtrace.trace(module, X, check=False), config)
    assert any(isinstance(m, M.BatchNorm2d) for m in prepared.modules())


def _article_head(self: Any, x: Any) -> Any:
    levels = [F.flatten(self.a(x), 2), F.flatten(self.b(F.max_pool2d(x, 2)), 2)]
    return F.concat(levels, 2) * self.stride


def test_the_head_exports_to_caffe_once_it_is_absorbed(tmp_path: Path) -> None:
    flat = normalize(
        qtrace.trace(
            net(_article_head, a=_conv(), b=_conv(), stride=mge.Tensor(STRIDES.numpy().reshape(1, 1, 40))),
            X,
            check=False,
        )
    )
    with pytest.raises(
        ExportError, match="Caffe adds and multiplies by a stored number for each channel only"
    ):
        qtrace.export(flat, tmp_path / "head.prototxt")
    expected = flat(mge.Tensor(X)).numpy()
    absorb(flat)
    path = qtrace.export(flat, tmp_path / "head.prototxt")
    loaded = cv2.dnn.readNetFromCaffe(str(path), str(path.with_suffix(".caffemodel")))
    loaded.setInput(X)
    np.testing.assert_allclose(loaded.forward(), expected, rtol=0, atol=1e-5 * np.abs(expected).max())

"""Documents of one op: as TVM writes them, read back and compared with numpy; and as we write them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import numpy as np
import pytest

import qtrace
from qtrace.errors import GraphError
from qtrace.graph import MSCGraph, from_msc, functions, to_traced
from qtrace.targets.msc.kinds import KINDS
from tests.each import each_of
from tests.nets import net

RNG = np.random.default_rng(0)
IMAGE = RNG.standard_normal((2, 4, 6, 6)).astype(np.float32)
ROWS = RNG.standard_normal((3, 5)).astype(np.float32)
INDEX = np.array([[0, 2, 1]], np.int32)


def _normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def _document(
    optype: str,
    attrs: dict[str, str],
    inputs: Sequence[np.ndarray],
    weights: dict[str, np.ndarray],
    results: Sequence[np.ndarray],
    index: int | None = None,
) -> MSCGraph:
    """A document of one op in MSC's form; of a picked output with the node ``get_item`` that TVM writes."""

    def tensor(name: str, value: np.ndarray) -> dict[str, Any]:
        return {"name": name, "dtype": value.dtype.name, "shape": list(value.shape)}

    def node(position: int, name: str, kind: str, parents: list[str], **more: Any) -> dict[str, Any]:
        return {
            **{"index": position, "name": name, "optype": kind, "parents": parents, "inputs": []},
            **{"attrs": {}, "weights": {}, **more},
        }

    nodes = [node(i, f"x{i}", "input", [], outputs=[tensor(f"x{i}:0", x)]) for i, x in enumerate(inputs)]
    names = [each["name"] for each in nodes]
    op = {
        **{"inputs": [f"{name}:0" for name in names], "attrs": attrs},
        "outputs": [tensor(f"op:{i}", value) for i, value in enumerate(results)],
        "weights": {kind: tensor(f"op_{kind}", value) for kind, value in weights.items()},
    }
    nodes.append(node(len(nodes), "op", optype, names, **op))
    outputs = [f"op:{i}" for i in range(len(results))]
    if index is not None:
        picked = {"outputs": [tensor("item:0", results[index])], "attrs": {"index": str(index)}}
        nodes.append(node(len(nodes), "item", "get_item", ["op"], inputs=outputs, **picked))
        outputs = ["item:0"]
    document = {"name": "main", "inputs": [f"{name}:0" for name in names], "outputs": outputs, "nodes": nodes}
    return MSCGraph.from_json(json.dumps(document), {f"op_{kind}": value for kind, value in weights.items()})


def _conv(x: np.ndarray, w: np.ndarray, pad: Any = 0, stride: int = 1, groups: int = 1) -> np.ndarray:
    widths = ((0, 0), (0, 0), *([(pad, pad)] * (x.ndim - 2) if isinstance(pad, int) else pad))
    axes = tuple(range(2, x.ndim))
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(x, widths), w.shape[2:], axes)
    windows = windows[(slice(None), slice(None), *[slice(None, None, stride)] * len(axes))]
    parts = []
    out, inner = "hwd"[: len(axes)], "xyz"[: len(axes)]
    for own, weight in zip(np.split(windows, groups, 1), np.split(w, groups), strict=True):
        parts.append(np.einsum(f"nc{out}{inner},oc{inner}->no{out}", own, weight))
    return np.concatenate(parts, 1)


def _windows(x: np.ndarray, size: int, stride: int, pad: int, value: float) -> np.ndarray:
    padded = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)), constant_values=value)
    return np.lib.stride_tricks.sliding_window_view(padded, (size, size), (2, 3))[:, :, ::stride, ::stride]


def _normalize(x: np.ndarray, axes: Any, eps: float) -> np.ndarray:
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + eps)


def _groups(x: np.ndarray, count: int, eps: float) -> np.ndarray:
    return _normalize(x.reshape(2, count, -1), 2, eps).reshape(x.shape)


def _softmax(x: np.ndarray, axis: int) -> np.ndarray:
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def _linear_resize(x: np.ndarray, size: int, aligned: bool) -> np.ndarray:
    at = np.arange(size)
    place = at * (x.shape[2] - 1) / (size - 1) if aligned else (at + 0.5) * x.shape[2] / size - 0.5
    low = np.floor(place).astype(int)
    share = (place - low).astype(np.float32)
    first, last = (n.clip(0, x.shape[2] - 1) for n in (low, low + 1))
    rows = x[:, :, first] * (1 - share)[:, None] + x[:, :, last] * share[:, None]
    return rows[..., first] * (1 - share) + rows[..., last] * share


GAIN, SHIFT, MEAN, VAR = (_normal(4), _normal(4), _normal(4), 1 + _normal(4) ** 2)
STATS = {"gamma": GAIN, "beta": SHIFT, "mean": MEAN, "var": VAR}
W1, W2, WG, W3 = _normal(5, 4, 3), _normal(5, 4, 3, 3), _normal(6, 2, 3, 3), _normal(2, 3, 2, 2, 2)
WT, BIAS, LINES, VOLUME = _normal(4, 3, 2, 2), _normal(5), _normal(2, 4, 9), _normal(1, 3, 4, 4, 4)
DENSE = _normal(7, 5)


def _channels(value: np.ndarray, rank: int = 4) -> np.ndarray:
    return value.reshape(-1, *[1] * (rank - 2))


def _batch_norm(x: np.ndarray, eps: float, gain: bool = True, shift: bool = True) -> np.ndarray:
    y = (x - _channels(MEAN, x.ndim)) / np.sqrt(_channels(VAR, x.ndim) + eps)
    return y * (_channels(GAIN, x.ndim) if gain else 1) + (_channels(SHIFT, x.ndim) if shift else 0)


def _transposed(x: np.ndarray) -> np.ndarray:
    y = np.einsum("nchw,cokl->nohkwl", x, WT)
    return y.reshape(*y.shape[:2], y.shape[2] * 2, -1)


_CONV = {"data_layout": "NCHW", "kernel_layout": "OIHW", "out_layout": "NCHW", "out_dtype": "void"}
_POOL = {"pool_size": "3,3", "strides": "2,2", "padding": "1,1,1,1", "dilation": "1,1", "ceil_mode": "0"}
_RESIZE = {"roi": "0.000000,0.000000,0.000000,0.000000", "layout": "NCHW", "cubic_alpha": "-0.750000"}
_SQUEEZED = _normal(2, 1, 3, 1)
# Type, attributes as TVM writes them, inputs, weights, results by numpy.
READ: list[tuple[str, dict[str, str], list[np.ndarray], dict[str, np.ndarray], Any]] = [
    ("nn.conv1d", {"strides": "2,", "padding": "1,1"}, [LINES], {"weight": W1}, _conv(LINES, W1, 1, 2)),
    (
        *("msc.conv1d_bias", {"padding": "1,1", "data_layout": "NCW"}, [LINES]),
        *({"weight": W1, "bias": BIAS}, _conv(LINES, W1, 1) + BIAS[:, None]),
    ),
    ("nn.conv2d", {}, [IMAGE], {"weight": W2}, _conv(IMAGE, W2)),
    ("nn.conv2d", {}, [IMAGE, W2], {}, _conv(IMAGE, W2)),
    ("nn.conv2d", {"padding": "0,1,2,0"}, [IMAGE], {"weight": W2}, _conv(IMAGE, W2, [(0, 2), (1, 0)])),
    (
        *("msc.conv2d_bias", {"strides": "2,2", "padding": "1,1,1,1", **_CONV}, [IMAGE]),
        *({"weight": W2, "bias": BIAS}, _conv(IMAGE, W2, 1, 2) + BIAS[:, None, None]),
    ),
    ("nn.conv2d", {"groups": "2"}, [IMAGE], {"weight": WG}, _conv(IMAGE, WG, groups=2)),
    ("nn.conv3d", {}, [VOLUME], {"weight": W3}, _conv(VOLUME, W3)),
    ("nn.conv2d_transpose", {"strides": "2,2"}, [IMAGE], {"weight": WT}, _transposed(IMAGE)),
    ("msc.linear", {"axes": ""}, [ROWS], {"weight": DENSE}, ROWS @ DENSE.T),
    ("msc.linear_bias", {}, [ROWS], {"weight": DENSE, "bias": DENSE[:, 0]}, ROWS @ DENSE.T + DENSE[:, 0]),
    ("nn.bias_add", {}, [IMAGE], {"bias": SHIFT}, IMAGE + _channels(SHIFT)),
    ("matmul", {"out_dtype": ""}, [ROWS, DENSE.T.copy()], {}, ROWS @ DENSE.T),
    ("nn.batch_matmul", {"transpose_a": "0", "transpose_b": "1"}, [ROWS, DENSE], {}, ROWS @ DENSE.T),
    ("msc.embedding", {"axis": "0"}, [INDEX], {"weight": ROWS}, ROWS[INDEX]),
    ("msc.embedding", {}, [INDEX.astype(np.int64)], {"weight": ROWS}, ROWS[INDEX]),
    ("nn.max_pool2d", _POOL, [IMAGE], {}, _windows(IMAGE, 3, 2, 1, -np.inf).max((4, 5))),
    ("nn.max_pool2d", {"pool_size": "2,2"}, [IMAGE], {}, _windows(IMAGE, 2, 1, 0, 0).max((4, 5))),
    (
        *("nn.avg_pool2d", {**_POOL, "count_include_pad": "1", "layout": "NCHW"}, [IMAGE], {}),
        _windows(IMAGE, 3, 2, 1, 0).mean((4, 5)),
    ),
    (
        *("nn.avg_pool2d", _POOL, [IMAGE], {}),
        _windows(IMAGE, 3, 2, 1, 0).sum((4, 5)) / _windows(np.ones_like(IMAGE), 3, 2, 1, 0).sum((4, 5)),
    ),
    (
        *("nn.adaptive_avg_pool2d", {"output_size": "2,3", "layout": "NCHW"}, [IMAGE], {}),
        IMAGE.reshape(2, 4, 2, 3, 3, 2).mean((3, 5)),
    ),
    (
        *("nn.batch_norm", {"axis": "1", "epsilon": "0.001000", "center": "1", "scale": "1"}, [IMAGE], STATS),
        _batch_norm(IMAGE, 1e-3),
    ),
    ("nn.batch_norm", {"center": "0", "scale": "0"}, [IMAGE], STATS, _batch_norm(IMAGE, 1e-5, False, False)),
    ("nn.batch_norm", {"scale": "0"}, [LINES], STATS, _batch_norm(LINES, 1e-5, False)),
    (
        "nn.layer_norm",
        {"axes": "-1,"},
        [ROWS],
        {"gamma": BIAS, "beta": BIAS},
        _normalize(ROWS, 1, 1e-5) * BIAS + BIAS,
    ),
    (
        *("nn.layer_norm", {"axes": "2,3", "epsilon": "0.01", "center": "0"}, [IMAGE]),
        *({"gamma": IMAGE[0, 0], "beta": IMAGE[0, 1]}, _normalize(IMAGE, (2, 3), 0.01) * IMAGE[0, 0]),
    ),
    (
        *("nn.group_norm", {"num_groups": "2", "channel_axis": "1", "axes": "2,3"}, [IMAGE]),
        *({"gamma": GAIN, "beta": SHIFT}, _groups(IMAGE, 2, 1e-5) * _channels(GAIN) + _channels(SHIFT)),
    ),
    (
        *("nn.instance_norm", {"channel_axis": "1", "axes": "2,3", "scale": "0"}, [IMAGE]),
        *({"gamma": GAIN, "beta": SHIFT}, _groups(IMAGE, 4, 1e-5) + _channels(SHIFT)),
    ),
    ("nn.softmax", {}, [IMAGE], {}, _softmax(IMAGE, 3)),
    ("nn.softmax", {"axis": "1"}, [IMAGE], {}, _softmax(IMAGE, 1)),
    ("nn.log_softmax", {"axis": "-1"}, [ROWS], {}, np.log(_softmax(ROWS, 1))),
    ("nn.leakyrelu", {"alpha": "0.200000"}, [ROWS], {}, np.where(ROWS > 0, ROWS, ROWS * np.float32(0.2))),
    ("nn.leakyrelu", {}, [ROWS], {}, np.where(ROWS > 0, ROWS, ROWS * np.float32(0.01))),
    ("nn.prelu", {"axis": "1"}, [IMAGE, GAIN], {}, np.where(IMAGE > 0, IMAGE, IMAGE * _channels(GAIN))),
    ("nn.softplus", {"beta": "1.000000", "threshold": "20.000000"}, [ROWS], {}, np.log1p(np.exp(ROWS))),
    ("clip", {"min": "0.000000", "max": "6.000000"}, [4 * ROWS], {}, (4 * ROWS).clip(0, 6)),
    (
        *("nn.pad", {"pad_width": "0,0,0,0,1,2,0,1", "pad_mode": "reflect"}, [IMAGE], {}),
        np.pad(IMAGE, ((0, 0), (0, 0), (1, 2), (0, 1)), mode="reflect"),
    ),
    (
        "nn.pad",
        {"pad_width": "1,0,0,2", "pad_value": "0.5"},
        [ROWS],
        {},
        np.pad(ROWS, ((1, 0), (0, 2)), constant_values=0.5),
    ),
    (
        *("nn.pixel_shuffle", {"upscale_factor": "2"}, [IMAGE], {}),
        IMAGE.reshape(2, 1, 2, 2, 6, 6).transpose(0, 1, 4, 2, 5, 3).reshape(2, 1, 12, 12),
    ),
    ("image.resize2d", {**_RESIZE, "size": "9,9"}, [IMAGE], {}, _linear_resize(IMAGE, 9, False)),
    (
        *(
            "image.resize2d",
            {"size": "11,11", "coordinate_transformation_mode": "align_corners"},
            [IMAGE],
            {},
        ),
        _linear_resize(IMAGE, 11, True),
    ),
    (
        "image.resize2d",
        {"size": "12,12", "method": "nearest_neighbor"},
        [IMAGE],
        {},
        IMAGE.repeat(2, 2).repeat(2, 3),
    ),
    ("permute_dims", {"axes": "0,2,3,1"}, [IMAGE], {}, IMAGE.transpose(0, 2, 3, 1)),
    ("permute_dims", {"axes": ""}, [IMAGE], {}, IMAGE.transpose()),
    ("permute_dims", {}, [ROWS], {}, ROWS.T),
    ("reshape", {"shape": "2,144"}, [IMAGE], {}, IMAGE.reshape(2, 144)),
    ("broadcast_to", {"shape": "2,3,5"}, [ROWS], {}, np.broadcast_to(ROWS, (2, 3, 5)).copy()),
    ("squeeze", {"axis": "-1,"}, [_SQUEEZED], {}, _SQUEEZED[..., 0]),
    ("squeeze", {}, [_SQUEEZED], {}, _SQUEEZED.squeeze()),
    ("expand_dims", {"axis": "0,-1"}, [ROWS], {}, ROWS[None, :, :, None]),
    ("concat", {"axis": "-1"}, [ROWS, 2 * ROWS], {}, np.concatenate([ROWS, 2 * ROWS], 1)),
    ("stack", {"axis": "-1"}, [ROWS, 2 * ROWS], {}, np.stack([ROWS, 2 * ROWS], 2)),
    ("split", {"indices_or_sections": "2", "axis": "1"}, [IMAGE], {}, np.split(IMAGE, 2, 1)),
    ("split", {"indices_or_sections": "1,3", "axis": "-1"}, [ROWS], {}, np.split(ROWS, [1, 3], 1)),
    ("split", {"indices_or_sections": "1,"}, [ROWS], {}, np.split(ROWS, [1], 0)),
    ("split", {"indices_or_sections": "2"}, [ROWS], {}, [ROWS[:2], ROWS[2:]]),
    ("tile", {"repeats": "2,3"}, [ROWS], {}, np.tile(ROWS, (2, 3))),
    ("repeat", {"repeats": "2", "axis": "1"}, [ROWS], {}, ROWS.repeat(2, 1)),
    (
        "strided_slice",
        {"axes": "1,3", "begin": "1,-1", "end": "3,-7", "strides": "1,-2"},
        [IMAGE],
        {},
        IMAGE[:, 1:3, :, ::-2],
    ),
    ("strided_slice", {"axes": "0,", "begin": "1,", "end": "2147483647,"}, [ROWS], {}, ROWS[1:]),
    ("take", {"axis": "1", "mode": "fast"}, [ROWS, INDEX[0]], {}, ROWS[:, INDEX[0]]),
    ("take", {}, [ROWS, INDEX], {}, ROWS.reshape(-1)[INDEX]),
    (
        "gather_elements",
        {"axis": "0"},
        [ROWS[:, :3].copy(), INDEX],
        {},
        np.take_along_axis(ROWS[:, :3], INDEX, 0),
    ),
    (
        "topk",
        {"k": "2", "axis": "-1", "largest": "1"},
        [ROWS],
        {},
        [-np.sort(-ROWS)[:, :2], np.argsort(-ROWS)[:, :2]],
    ),
    (
        "topk",
        {"k": "2", "axis": "1", "largest": "0", "ret_type": "values"},
        [IMAGE],
        {},
        np.sort(IMAGE, 1)[:, :2],
    ),
    ("argmax", {"axis": "1", "keepdims": "1"}, [ROWS], {}, ROWS.argmax(1)[:, None]),
    ("argmin", {"axis": "0"}, [ROWS], {}, ROWS.argmin(0)),
    *(
        (name, {"axis": "2,-1", "keepdims": "1"}, [IMAGE], {}, function(IMAGE, axis=(2, 3), keepdims=True))
        for name, function in (
            *(("mean", np.mean), ("sum", np.sum), ("max", np.max), ("min", np.min), ("prod", np.prod)),
            *(("std", np.std), ("variance", np.var)),
        )
    ),
    ("mean", {}, [ROWS], {}, ROWS.mean()),
    ("cumsum", {"axis": "1", "exclusive": "0"}, [ROWS], {}, ROWS.cumsum(1)),
    ("astype", {"dtype": "int32"}, [4 * ROWS], {}, (4 * ROWS).astype(np.int32)),
    ("where", {}, [ROWS > 0, ROWS, 2 * ROWS], {}, np.where(ROWS > 0, ROWS, 2 * ROWS)),
    ("tuple", {}, [ROWS, IMAGE], {}, [ROWS, IMAGE]),
    ("msc.matmul", {"out_dtype": ""}, [ROWS, ROWS.T.copy()], {}, ROWS @ ROWS.T),
    *(
        (name, {}, [np.tanh(ROWS)], {}, function(np.tanh(ROWS)))
        for name, function in (("asin", np.arcsin), ("acos", np.arccos), ("atanh", np.arctanh))
    ),
    ("acosh", {}, [1 + ROWS**2], {}, np.arccosh(1 + ROWS**2)),
    *(
        (name, {}, [np.abs(ROWS)], {}, function(np.abs(ROWS)))
        for name, function in (
            *(
                ("exp", np.exp),
                ("log", np.log),
                ("sqrt", np.sqrt),
                ("negative", np.negative),
                ("floor", np.floor),
            ),
            *(("square", np.square), ("tanh", np.tanh), ("sigmoid", lambda x: 1 / (1 + np.exp(-x)))),
            *(
                ("tan", np.tan),
                ("sinh", np.sinh),
                ("cosh", np.cosh),
                ("atan", np.arctan),
                ("isnan", np.isnan),
            ),
            *(("asinh", np.arcsinh), ("isinf", np.isinf), ("rsqrt", lambda x: 1 / np.sqrt(x))),
        )
    ),
    *(
        (name, {}, [ROWS, ROWS + 1], {}, function(ROWS, ROWS + 1))
        for name, function in (
            *(("add", np.add), ("subtract", np.subtract), ("multiply", np.multiply), ("divide", np.divide)),
            *(("maximum", np.maximum), ("less", np.less), ("floor_divide", np.floor_divide)),
        )
    ),
]


def _run(module: Any, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    results = module(*map(mge.Tensor, inputs))
    return [r.numpy() for r in (results if isinstance(results, (tuple, list)) else (results,))]


@each_of("case", READ, ids=lambda case: f"{case[0]} {' '.join(case[1].values())[:20]}")
def test_an_op_in_tvms_words_computes_what_numpy_does(case: Any) -> None:
    optype, attrs, inputs, weights, results = case
    results = [np.asarray(r) for r in (results if isinstance(results, list) else [results])]
    graph = _document(optype, attrs, inputs, weights, results)
    for result, expected in zip(_run(to_traced(graph), inputs), results, strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=2e-5)
    picked = _document(optype, attrs, inputs, weights, results, index=len(results) - 1)
    np.testing.assert_allclose(_run(to_traced(picked), inputs)[0], results[-1], rtol=1e-4, atol=2e-5)


REFUSED = [
    ("nn.conv2d", {"data_layout": "NHWC"}, [IMAGE], {"weight": W2}, "its data_layout is 'NHWC'"),
    (
        "nn.max_pool2d",
        {**_POOL, "dilation": "2,2"},
        [IMAGE],
        {},
        "its dilation is '2,2', and MegEngine computes only",
    ),
    ("nn.max_pool2d", {**_POOL, "padding": "0,0,1,1"}, [IMAGE], {}, "pools pad both ends alike"),
    ("image.resize2d", {"size": "4,4", "method": "nearest_neighbor"}, [IMAGE], {}, "pick other pixels"),
    ("nn.prelu", {}, [ROWS], {}, "it reads no weight"),
    ("permute_dims", {"axes": "0,7"}, [ROWS], {}, "its axes is '0,7', which a tensor of rank 2 lacks"),
    ("split", {"axis": "0"}, [ROWS], {}, "it lacks attribute 'indices_or_sections'"),
    (
        "strided_slice",
        {"axes": "0,", "begin": "a,", "end": "1,"},
        [ROWS],
        {},
        "its begin is 'a,': give 1 integers",
    ),
    ("get_item", {"index": "3"}, [ROWS], {}, "its index is '3', and it has 1 inputs"),
    ("cumsum", {"axis": "0", "exclusive": "1"}, [ROWS], {}, "its exclusive is '1'"),
    (
        "nn.group_norm",
        {"num_groups": "x", "channel_axis": "1", "axes": "2,3", "center": "0"},
        [IMAGE],
        {},
        "cannot be rebuilt",
    ),
    ("nn.attention", {}, [IMAGE], {}, "the document does not say how it is called"),
]


@each_of("case", REFUSED, ids=lambda case: f"{case[0]} {' '.join(case[1].values())[:20]}")
def test_what_megengine_lacks_is_refused_by_name(case: Any) -> None:
    optype, attrs, inputs, weights, message = case
    with pytest.raises(GraphError, match=message) as caught:
        to_traced(_document(optype, attrs, inputs, weights, [ROWS]))
    assert f"node op ({optype}) cannot be rebuilt" in str(caught.value)


P = mge.Parameter
CHANNELS = {name: P(value.reshape(1, 4, 1, 1)) for name, value in zip("gbmv", STATS.values(), strict=True)}
AFFINE = {"g": P(GAIN), "b": P(SHIFT)}
# A function of a module and its input, the type of its op, and attributes of TVM's that it must have.
WRITTEN: list[tuple[Callable[..., Any], dict[str, Any], np.ndarray, str, dict[str, str]]] = [
    (
        *(
            lambda self, x: F.nn.conv1d(x, self.w, stride=2, padding=1),
            {"w": P(W1)},
            LINES,
            "nn.conv1d",
        ),
        {"strides": "2,", "padding": "1,1", "data_layout": "NCW", "kernel_layout": "OIW", "groups": "1"},
    ),
    (
        *(lambda self, x: F.conv2d(x, self.w, padding=(1, 2)), {"w": P(W2)}, IMAGE, "nn.conv2d"),
        {"strides": "1,1", "padding": "1,2,1,2", "dilation": "1,1", "out_dtype": "float32"},
    ),
    (
        *(lambda self, x: F.conv_transpose2d(x, self.w, stride=2), {"w": P(WT)}, IMAGE),
        *("nn.conv2d_transpose", {"output_padding": "0,0", "kernel_layout": "IOHW", "strides": "2,2"}),
    ),
    (
        *(lambda self, x: F.max_pool2d(x, 3, 2, 1), {}, IMAGE, "nn.max_pool2d"),
        {**_POOL, "count_include_pad": "0", "layout": "NCHW", "out_layout": "NCHW"},
    ),
    (
        *(lambda self, x: F.avg_pool2d(x, 3, 2, 1, "average"), {}, IMAGE, "nn.avg_pool2d"),
        {**_POOL, "count_include_pad": "1"},
    ),
    (
        lambda self, x: F.adaptive_avg_pool2d(x, (2, 3)),
        {},
        IMAGE,
        "nn.adaptive_avg_pool2d",
        {"output_size": "2,3"},
    ),
    (
        *(lambda self, x: F.nn.batch_norm(x, self.m, self.v, self.g, self.b, eps=1e-3), CHANNELS, IMAGE),
        *("nn.batch_norm", {"axis": "1", "epsilon": "0.001", "center": "1", "scale": "1", "momentum": "0.1"}),
    ),
    (
        *(lambda self, x: F.nn.layer_norm(x, (6,), False), {}, IMAGE, "nn.layer_norm"),
        {"axes": "-1,", "epsilon": "1e-05", "center": "0", "scale": "0"},
    ),
    (
        *(lambda self, x: F.nn.group_norm(x, 2, True, self.g, self.b), AFFINE, IMAGE, "nn.group_norm"),
        {"num_groups": "2", "channel_axis": "1", "axes": "2,3", "center": "1", "scale": "1"},
    ),
    (lambda self, x: F.softmax(x, 1), {}, IMAGE, "nn.softmax", {"axis": "1"}),
    (lambda self, x: F.logsoftmax(x, 1), {}, ROWS, "nn.log_softmax", {"axis": "1"}),
    (lambda self, x: F.leaky_relu(x, 0.2), {}, ROWS, "nn.leakyrelu", {"alpha": "0.2"}),
    (lambda self, x: F.relu6(x), {}, 4 * ROWS, "clip", {"min": "0", "max": "6"}),
    (lambda self, x: F.clip(x, -1, 0.5), {}, ROWS, "clip", {"min": "-1.0", "max": "0.5"}),
    (lambda self, x: F.softplus(x), {}, ROWS, "nn.softplus", {"beta": "1.0", "threshold": "20.0"}),
    (
        *(lambda self, x: F.nn.pad(x, ((0, 0), (1, 2)), constant_value=0.5), {}, ROWS, "nn.pad"),
        {"pad_width": "0,0,1,2", "pad_mode": "constant", "pad_value": "0.5"},
    ),
    (lambda self, x: F.nn.pixel_shuffle(x, 2), {}, IMAGE, "nn.pixel_shuffle", {"upscale_factor": "2"}),
    (
        *(lambda self, x: F.nn.interpolate(x, scale_factor=2, mode="nearest"), {}, IMAGE, "image.resize2d"),
        {
            **{"size": "12,12", "method": "nearest_neighbor", "rounding_method": "floor", "layout": "NCHW"},
            "coordinate_transformation_mode": "asymmetric",
        },
    ),
    (
        *(lambda self, x: F.nn.interpolate(x, (9, 9)), {}, IMAGE, "image.resize2d"),
        {"method": "linear", "coordinate_transformation_mode": "half_pixel", "roi": "0.0,0.0,0.0,0.0"},
    ),
    (lambda self, x: F.transpose(x, (0, 2, 3, 1)), {}, IMAGE, "permute_dims", {"axes": "0,2,3,1"}),
    (lambda self, x: F.swapaxes(x, 1, 3), {}, IMAGE, "permute_dims", {"axes": "0,3,2,1"}),
    (lambda self, x: F.flatten(x, 1), {}, IMAGE, "reshape", {"shape": "2,144"}),
    (lambda self, x: F.squeeze(x, 3), {}, _SQUEEZED, "squeeze", {"axis": "3,"}),
    (lambda self, x: F.expand_dims(x, 1), {}, ROWS, "expand_dims", {"axis": "1,"}),
    (lambda self, x: F.broadcast_to(x, (2, 3, 5)), {}, ROWS, "broadcast_to", {"shape": "2,3,5"}),
    (lambda self, x: F.concat([x, x], 1), {}, ROWS, "concat", {"axis": "1"}),
    (lambda self, x: F.stack([x, x], 1), {}, ROWS, "stack", {"axis": "1"}),
    (lambda self, x: F.split(x, 2, 1), {}, IMAGE, "split", {"indices_or_sections": "2", "axis": "1"}),
    (lambda self, x: F.split(x, [1, 3], 1), {}, ROWS, "split", {"indices_or_sections": "1,3", "axis": "1"}),
    (lambda self, x: F.tile(x, (2, 3)), {}, ROWS, "tile", {"repeats": "2,3"}),
    (lambda self, x: F.repeat(x, 2, 1), {}, ROWS, "repeat", {"repeats": "2", "axis": "1"}),
    (
        *(lambda self, x: x[:, 1:3, :, ::-2], {}, IMAGE, "strided_slice"),
        {"axes": "1,3", "begin": "1,-1", "end": "3,-7", "strides": "1,-2"},
    ),
    (lambda self, x: x[..., 1:], {}, IMAGE, "strided_slice", {"axes": "3,", "begin": "1,", "end": "6,"}),
    (
        *(lambda self, x: F.topk(x, 2, descending=False), {}, ROWS, "topk"),
        {"k": "2", "axis": "-1", "largest": "0", "ret_type": "both"},
    ),
    (lambda self, x: F.argmax(x, 1), {}, ROWS, "argmax", {"axis": "1", "keepdims": "0"}),
    (lambda self, x: F.mean(x, (2, 3), True), {}, IMAGE, "mean", {"axis": "2,3", "keepdims": "1"}),
    (lambda self, x: F.var(x, 1), {}, ROWS, "variance", {"axis": "1,", "keepdims": "0"}),
    (lambda self, x: F.sum(x), {}, ROWS, "sum", {"axis": "", "keepdims": "0"}),
    (lambda self, x: F.cumsum(x, 1), {}, ROWS, "cumsum", {"axis": "1", "exclusive": "0"}),
    (lambda self, x: x.astype("int32"), {}, ROWS, "astype", {"dtype": "int32"}),
    (
        *(lambda self, x: F.matmul(x, x, transpose_b=True), {}, ROWS, "nn.batch_matmul"),
        {"transpose_a": "0", "transpose_b": "1"},
    ),
    (lambda self, x: F.matmul(x, F.transpose(x, (1, 0))), {}, ROWS, "matmul", {"out_dtype": "float32"}),
    (lambda self, x: F.nn.prelu(x, self.g), CHANNELS, IMAGE, "nn.prelu", {"axis": "1"}),
    (
        lambda self, x: F.linear(x, self.w),
        {"w": P(DENSE)},
        ROWS,
        "msc.linear",
        {"out_dtype": "float32"},
    ),
    (lambda self, x: functions.erf(x), {}, ROWS, "erf", {}),
    (lambda self, x: F.floor_div(x, F.abs(x)), {}, ROWS, "floor_divide", {}),
]


@each_of("case", WRITTEN, ids=lambda case: f"{case[3]} {' '.join(case[4].values())[:20]}")
def test_an_op_is_written_in_tvms_words_which_say_it(case: Any, tmp_path: Path) -> None:
    forward, members, x, optype, attrs = case
    traced = qtrace.trace(net(forward, **members), x, check=False)
    graph = from_msc(qtrace.export(traced, tmp_path / "g.json", format="msc"))
    node = next(node for node in graph.nodes if node.optype == optype)
    assert {key: node.attrs.get(key) for key in attrs} == attrs
    assert KINDS[optype].defaults.keys() <= node.attrs.keys()
    document = json.loads(graph.to_json())
    for each in document["nodes"]:
        each["attrs"].pop("call", None)
    back = to_traced(MSCGraph.from_json(json.dumps(document), graph.values))
    for result, expected in zip(_run(back, [x]), _run(traced, [x]), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


def test_an_index_that_is_no_slice_is_no_strided_slice(tmp_path: Path) -> None:
    for forward in (lambda self, x: x[:, 0], lambda self, x: x[:, None]):
        traced = qtrace.trace(net(forward), ROWS, check=False)
        graph = from_msc(qtrace.export(traced, tmp_path / "g.json", format="msc"))
        assert "strided_slice" not in {node.optype for node in graph.nodes}
        np.testing.assert_array_equal(_run(to_traced(graph), [ROWS])[0], _run(traced, [ROWS])[0])

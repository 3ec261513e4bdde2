"""Networks around layers and functions that MegEngine lacks, or has in other forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import ModelProto

from tests.importing.onnx.opaque_net import Net

__all__ = ["FORMS"]

FORMS: dict[str, Callable[[], ModelProto]] = {}


def form(function: Callable[[], ModelProto]) -> Callable[[], ModelProto]:
    FORMS[function.__name__.strip("_")] = function
    return function


def _forms(name: str, options: dict[str, Any], make: Callable[..., ModelProto]) -> None:
    for key, value in options.items():
        FORMS[f"{name}_{key}"] = lambda value=value: make(value)  # type: ignore[misc]


# Recurrent layers.


def _recurrent(options: tuple[str, dict[str, Any], bool]) -> ModelProto:
    op, attributes, full = options
    net, hidden = Net(), 6
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[op]
    ways = 2 if attributes.get("direction") == "bidirectional" else 1
    inputs = [
        net.steps(net.features),
        net.weights(ways, gates * hidden, 32),
        net.weights(ways, gates * hidden, hidden),
    ]
    inputs.append(net.weights(ways, 2 * gates * hidden))
    if full:
        inputs += [net.constant([8, 5], np.int32), net.weights(ways, 2, hidden)]
        if op == "LSTM":
            inputs += [net.weights(ways, 2, hidden), net.weights(ways, 3 * hidden)]
    results = net.add(op, inputs, 3 if op == "LSTM" else 2, hidden_size=hidden, **attributes)
    merged = net.add("Transpose", [results[0]], perm=[2, 0, 1, 3])
    y = net.linear(net.add("Reshape", [merged, net.ints(2, 8, ways * hidden)]), ways * hidden)
    return net.model(y, results[1])


_forms(
    "recurrent",
    {
        f"{op.lower()}_{kind}": (op, attributes, full)
        for op in ("LSTM", "GRU", "RNN")
        for kind, attributes, full in (
            ("plain", {}, False),
            ("reverse", {"direction": "reverse"}, False),
            ("bidirectional", {"direction": "bidirectional"}, False),
            ("full", {}, True),
            ("clip", {"clip": 2.0}, False),
        )
    },
    _recurrent,
)
_forms("gru", {"reset": ("GRU", {"linear_before_reset": 1}, True)}, _recurrent)
_forms("lstm", {"activations": ("LSTM", {"activations": ["HardSigmoid", "Relu", "Tanh"]}, False)}, _recurrent)
_forms("rnn", {"relu": ("RNN", {"activations": ["Relu"]}, False)}, _recurrent)

# Ops on maps (2, 4, 8, 8) that give such maps, possibly of another size.


def _map(options: tuple[str, list[Any], dict[str, Any], str, int]) -> ModelProto:
    op, inputs, attributes, domain, opset = options
    net = Net(opset)
    more = [net.constant(value) if value is not None else "" for value in inputs]
    y = net.add(op, [net.features, *more], domain=domain, **attributes)
    return net.model(net.conv(y))


_GRID = np.random.default_rng(1).uniform(-1.2, 1.2, (2, 6, 6, 2)).astype(np.float32)
_SIZES = np.array([2, 4, 12, 11], np.int64)
_SCALES = np.array([1, 1, 1.5, 0.75], np.float32)
_MAPS: dict[str, tuple[str, list[Any], dict[str, Any], str, int]] = {
    **{
        f"resize_{mode}_{transform}": (
            "Resize",
            [None, None, _SIZES],
            {"mode": mode, "coordinate_transformation_mode": transform},
            "",
            18,
        )
        for mode in ("nearest", "linear", "cubic")
        for transform in (
            *("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric"),
            *("half_pixel_symmetric",),
        )
    },
    **{
        f"resize_{rounding}": (
            "Resize",
            [None, _SCALES],
            {"mode": "nearest", "nearest_mode": rounding},
            "",
            18,
        )
        for rounding in ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
    },
    "resize_antialias": ("Resize", [None, None, _SIZES], {"mode": "linear", "antialias": 1}, "", 18),
    "resize_cubic_outside": (
        "Resize",
        [None, _SCALES],
        {"mode": "cubic", "exclude_outside": 1, "cubic_coeff_a": -0.5},
        "",
        18,
    ),
    "resize_crop": (
        "Resize",
        [np.array([0, 0, 0.1, 0.1, 1, 1, 0.9, 0.8], np.float32), None, _SIZES],
        {"mode": "linear", "coordinate_transformation_mode": "tf_crop_and_resize"},
        "",
        18,
    ),
    **{
        f"gridsample_{mode}_{padding}_{corners}": (
            "GridSample",
            [_GRID],
            {"mode": mode, "padding_mode": padding, "align_corners": corners},
            "",
            20,
        )
        for mode in ("linear", "nearest", "cubic")
        for padding in ("zeros", "border", "reflection")
        for corners in (0, 1)
    },
    "maxpool_ceil": ("MaxPool", [], {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1}, "", 17),
    "maxpool_dilated": ("MaxPool", [], {"kernel_shape": [2, 2], "dilations": [2, 2]}, "", 17),
    "averagepool_ceil": (
        "AveragePool",
        [],
        {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1},
        "",
        17,
    ),
    "averagepool_dilated": ("AveragePool", [], {"kernel_shape": [2, 2], "dilations": [2, 2]}, "", 19),
    "lppool": ("LpPool", [], {"kernel_shape": [2, 2], "p": 3}, "", 18),
    "lrn": ("LRN", [], {"size": 3}, "", 17),
    "hardmax": ("Hardmax", [], {"axis": 1}, "", 17),
    "celu": ("Celu", [], {"alpha": 0.7}, "", 17),
    "pad_wrap": ("Pad", [np.array([0, 0, 1, 2, 0, 0, 2, 1])], {"mode": "wrap"}, "", 19),
    "fusedconv": (
        "FusedConv",
        [np.random.default_rng(2).standard_normal((4, 4, 3, 3)).astype(np.float32) * 0.3],
        {"activation": "Relu"},
        "com.microsoft",
        17,
    ),
    "ms_gelu": ("Gelu", [], {}, "com.microsoft", 17),
    "ms_fastgelu": ("FastGelu", [], {}, "com.microsoft", 17),
    "ms_quickgelu": ("QuickGelu", [], {"alpha": 1.5}, "com.microsoft", 17),
    "ms_biasgelu": ("BiasGelu", [np.arange(8, dtype=np.float32) / 8], {}, "com.microsoft", 17),
    "ms_gridsample": ("GridSample", [_GRID], {"mode": "bicubic"}, "com.microsoft", 16),
}
_forms("map", _MAPS, _map)


@form
def map_ms_inverse() -> ModelProto:
    """Inverse matrices, of such that are far from singular."""
    net = Net()
    matrices = net.add("Add", [net.features, net.constant(np.eye(8, dtype=np.float32) * 8)])
    return net.model(net.conv(net.add("Inverse", [matrices], domain="com.microsoft")))


# Ops on rows (2, 8, 32).


def _rows(options: tuple[str, list[Any], dict[str, Any], str, int]) -> ModelProto:
    op, inputs, attributes, domain, opset = options
    net = Net(opset)
    rows = net.rows(net.features)
    more = [rows if value is _X else "" if value is None else net.constant(value) for value in inputs]
    return net.model(net.linear(net.add(op, [rows, *more], domain=domain, **attributes), 32))


_X: Any = object()
_ONES, _HALF = np.ones(32, np.float32), np.linspace(-1, 1, 32, dtype=np.float32)
_SQUARE = np.random.default_rng(5).standard_normal((32, 32)).astype(np.float32) * 0.3
_ROTATION = np.random.default_rng(6).uniform(-1, 1, (2, 8, 4)).astype(np.float32)
_ROWS: dict[str, tuple[str, list[Any], dict[str, Any], str, int]] = {
    "ms_fusedmatmul": ("FusedMatMul", [_SQUARE], {"alpha": 0.5, "transB": 1}, "com.microsoft", 17),
    "ms_skiplayernorm": ("SkipLayerNormalization", [_X, _ONES, _HALF, _HALF], {}, "com.microsoft", 17),
    "ms_skipsimplified": ("SkipSimplifiedLayerNormalization", [_X, _ONES], {}, "com.microsoft", 17),
    "ms_multiheadattention": ("MultiHeadAttention", [_X, _X], {"num_heads": 4}, "com.microsoft", 17),
    "ms_attention": (
        "Attention",
        [np.concatenate([_SQUARE] * 3, 1), np.zeros(96, np.float32)],
        {"num_heads": 4},
        "com.microsoft",
        17,
    ),
    "attention": ("Attention", [_X, _X], {"q_num_heads": 4, "kv_num_heads": 4}, "", 23),
    "attention_causal": (
        "Attention",
        [_X, _X],
        {"q_num_heads": 4, "kv_num_heads": 4, "is_causal": 1},
        "",
        23,
    ),
    "rotary": ("RotaryEmbedding", [np.cos(_ROTATION), np.sin(_ROTATION)], {"num_heads": 4}, "", 23),
    "rotary_interleaved": (
        "RotaryEmbedding",
        [np.cos(_ROTATION), np.sin(_ROTATION)],
        {"num_heads": 4, "interleaved": 1},
        "",
        23,
    ),
    "rmsnorm": ("RMSNormalization", [_ONES], {}, "", 23),
    "det": ("LpNormalization", [], {"p": 1}, "", 17),
    "cumsum": ("CumSum", [np.array(1)], {"exclusive": 1, "reverse": 1}, "", 17),
    "scatter": (
        "ScatterElements",
        [np.zeros((2, 1, 32), np.int64), np.ones((2, 1, 32), np.float32)],
        {"axis": 1, "reduction": "max"},
        "",
        18,
    ),
    "reverse": ("ReverseSequence", [np.array([3, 8])], {"batch_axis": 0, "time_axis": 1}, "", 17),
    "trilu": ("Trilu", [np.array(1)], {"upper": 0}, "", 17),
}
_forms("rows", _ROWS, _rows)


@form
def dft() -> ModelProto:
    net = Net(20)
    rows = net.add("Unsqueeze", [net.rows(net.features), net.ints(-1)])
    spectrum = net.add("DFT", [rows, "", net.constant(np.array(2))], onesided=1)
    real = net.add("ReduceSumSquare", [spectrum, net.ints(-1)], keepdims=0)
    return net.model(net.linear(real, 17))


@form
def stft() -> ModelProto:
    net = Net(17)
    signal = net.add("Reshape", [net.features, net.ints(2, 256)])
    spectrum = net.add(
        "STFT",
        [signal, net.constant(np.array(16)), net.constant(np.hanning(32).astype(np.float32))],
        onesided=1,  # the default of ONNX, but not of onnxruntime
    )
    return net.model(net.linear(net.add("ReduceSumSquare", [spectrum], axes=[-1], keepdims=0), 17))


@form
def einsum_trace() -> ModelProto:
    net = Net()
    return net.model(net.add("Einsum", [net.features], equation="bcii->bci"))


@form
def ml_normalizer() -> ModelProto:
    net = Net()
    flat = net.add("Reshape", [net.features, net.ints(2, 256)])
    return net.model(net.linear(net.add("Normalizer", [flat], domain="ai.onnx.ml", norm="L2"), 256))


@form
def ml_scaler() -> ModelProto:
    net = Net()
    flat = net.add("Reshape", [net.features, net.ints(2, 256)])
    scaled = net.add("Scaler", [flat], domain="ai.onnx.ml", offset=[0.5], scale=[2.0])
    return net.model(net.linear(scaled, 256))


@form
def ml_regressor() -> ModelProto:
    net = Net()
    flat = net.add("Reshape", [net.features, net.ints(2, 256)])
    coefficients = (np.arange(512) % 7 / 7 - 0.5).tolist()
    y = net.add("LinearRegressor", [flat], domain="ai.onnx.ml", coefficients=coefficients, targets=2)
    return net.model(y)


@form
def ml_trees() -> ModelProto:
    net = Net()
    flat = net.add("Reshape", [net.features, net.ints(2, 256)])
    y = net.add(
        "TreeEnsembleRegressor",
        [flat],
        domain="ai.onnx.ml",
        n_targets=1,
        nodes_falsenodeids=[2, 0, 0],
        nodes_featureids=[3, 0, 0],
        nodes_modes=["BRANCH_LEQ", "LEAF", "LEAF"],
        nodes_nodeids=[0, 1, 2],
        nodes_treeids=[0, 0, 0],
        nodes_truenodeids=[1, 0, 0],
        nodes_values=[0.2, 0.0, 0.0],
        target_ids=[0, 0],
        target_nodeids=[1, 2],
        target_treeids=[0, 0],
        target_weights=[0.5, 1.5],
    )
    return net.model(net.linear(flat, 256), y)


@form
def ml_labels() -> ModelProto:
    """Text between two nodes that are kept."""
    net = Net()
    best = net.add("ArgMax", [net.rows(net.features)], axis=2, keepdims=0)
    text = net.add("LabelEncoder", [best], domain="ai.onnx.ml", keys_int64s=[0, 1], values_strings=["a", "b"])
    number = net.add(
        "LabelEncoder", [text], domain="ai.onnx.ml", keys_strings=["a", "b"], values_floats=[0.5, 1.5]
    )
    return net.model(net.linear(net.rows(net.features), 32), number)


def _roi(options: dict[str, Any]) -> ModelProto:
    net = Net(16)
    boxes = net.constant(np.array([[0, 0, 5, 5], [1, 2, 6, 7], [2, 2, 3, 3]], np.float32))
    y = net.add(
        "RoiAlign", [net.features, boxes, net.ints(0, 1, 1)], output_height=4, output_width=4, **options
    )
    return net.model(net.conv(y))


_forms(
    "roialign",
    {
        "avg": {"sampling_ratio": 2},
        "max": {"mode": "max", "sampling_ratio": 2},
        "old": {"coordinate_transformation_mode": "output_half_pixel"},
        "adaptive": {"spatial_scale": 0.5},
    },
    _roi,
)


@form
def conv_1d_groups() -> ModelProto:
    net = Net()
    flat = net.add("Reshape", [net.features, net.ints(2, 4, 64)])
    y = net.add("Conv", [flat, net.weights(8, 2, 3)], group=2, dilations=[2], pads=[1, 3])
    return net.model(net.linear(y, 64))


@form
def conv_computed_weight() -> ModelProto:
    net = Net()
    weight = net.add("Reshape", [net.add("ReduceMean", [net.features], axes=[0]), net.ints(1, 4, 8, 8)])
    return net.model(net.add("Conv", [net.features, weight]))


def _conv_transpose(options: dict[str, Any]) -> ModelProto:
    net = Net()
    y = net.add(
        "ConvTranspose", [net.features, net.weights(4, 4 // options.get("group", 1), 3, 3)], **options
    )
    return net.model(net.conv(y))


_forms(
    "convtranspose",
    {
        "output_padding": {"strides": [2, 2], "output_padding": [1, 1]},
        "output_shape": {"strides": [2, 2], "output_shape": [17, 16]},
        "auto_pad": {"strides": [2, 2], "auto_pad": "SAME_LOWER"},
        "dilated": {"dilations": [2, 2]},
        "groups": {"group": 4},
        "pads": {"pads": [0, 1, 2, 0]},
    },
    _conv_transpose,
)


@form
def pool_3d() -> ModelProto:
    net = Net()
    volume = net.add("Reshape", [net.features, net.ints(2, 1, 4, 8, 8)])
    pooled = net.add(
        "AveragePool", [net.add("MaxPool", [volume], kernel_shape=[2, 2, 2])], kernel_shape=[1, 2, 2]
    )
    return net.model(net.add("GlobalAveragePool", [pooled]), pooled)


@form
def maxpool_indices() -> ModelProto:
    net = Net()
    values, places = net.add("MaxPool", [net.features], 2, kernel_shape=[2, 2], strides=[2, 2])
    back = net.add("MaxUnpool", [values, places], kernel_shape=[2, 2], strides=[2, 2])
    return net.model(net.conv(back))

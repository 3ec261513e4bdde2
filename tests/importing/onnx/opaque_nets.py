"""Small networks of convolutions around ops that MegEngine lacks, or has in other forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

__all__ = ["FORMS", "SHAPE", "Net", "build"]

SHAPE = (2, 3, 8, 8)
_CHANNELS = 4


class Net:
    """A network under construction: a convolution and a Relu, some nodes, and a tail."""

    def __init__(self, opset: int = 17) -> None:
        self.opset = opset
        self.nodes: list[NodeProto] = []
        self.stored: list[TensorProto] = []
        self.random = np.random.default_rng(0)
        self.domains: dict[str, int] = {}
        weight = self.weights(_CHANNELS, SHAPE[1], 3, 3)
        self.features = self.add("Relu", [self.add("Conv", ["x", weight], pads=[1, 1, 1, 1])])

    def weights(self, *shape: int, scale: float = 0.3) -> str:
        return self.constant(self.random.standard_normal(shape).astype(np.float32) * scale)

    def constant(self, value: Any, dtype: Any = None) -> str:
        name = f"w{len(self.stored)}"
        self.stored.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def ints(self, *values: int) -> str:
        return self.constant(np.array(values, np.int64))

    def add(self, op: str, inputs: Sequence[str], count: int = 1, domain: str = "", **attributes: Any) -> Any:
        outputs = [f"v{len(self.nodes)}_{i}" for i in range(count)]
        if domain:
            self.domains[domain] = 3 if domain == "ai.onnx.ml" else 1
        name = f"{op.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), outputs, name=name, domain=domain, **attributes))
        return outputs[0] if count == 1 else outputs

    def rows(self, x: str) -> str:
        """A tensor (2, 4, 8, 8) as rows (2, 8, 32)."""
        return self.add("Reshape", [self.add("Transpose", [x], perm=[0, 2, 1, 3]), self.ints(2, 8, 32)])

    def steps(self, x: str) -> str:
        """A tensor (2, 4, 8, 8) as a sequence (8, 2, 32)."""
        return self.add("Transpose", [self.rows(x)], perm=[1, 0, 2])

    def conv(self, x: str, channels: int = _CHANNELS) -> str:
        return self.add("Conv", [x, self.weights(_CHANNELS, channels, 3, 3)], pads=[1, 1, 1, 1])

    def linear(self, x: str, inputs: int) -> str:
        return self.add("MatMul", [x, self.weights(inputs, 5)])

    def model(self, *outputs: str, functions: Sequence[Any] = ()) -> ModelProto:
        results = [onnx.ValueInfoProto(name=name) for name in outputs]
        x = helper.make_tensor_value_info("x", TensorProto.FLOAT, SHAPE)
        graph = helper.make_graph(self.nodes, "net", [x], results, self.stored)
        imports = [helper.make_opsetid("", self.opset)]
        imports += [helper.make_opsetid(domain, version) for domain, version in self.domains.items()]
        model = helper.make_model(graph, opset_imports=imports, functions=list(functions), ir_version=10)
        if self.opset >= 23:
            model.ir_version = 11
        for value in model.graph.output:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
        return model


FORMS: dict[str, Callable[[], ModelProto]] = {}


def form(function: Callable[[], ModelProto]) -> Callable[[], ModelProto]:
    FORMS[function.__name__.strip("_")] = function
    return function


def build(name: str) -> ModelProto:
    """Returns the network of a form."""
    return FORMS[name]()


def _forms(name: str, options: dict[str, Any], make: Callable[..., ModelProto]) -> None:
    for key, value in options.items():
        FORMS[f"{name}_{key}"] = lambda value=value: make(value)  # type: ignore[misc]


# Recurrent layers.


def _recurrent(options: tuple[str, dict[str, Any], bool]) -> ModelProto:
    op, attributes, full = options
    net, hidden = Net(), 6
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[op]
    ways = 2 if attributes.get("direction") == "bidirectional" else 1
    inputs = [net.steps(net.features), net.weights(ways, gates * hidden, 32), net.weights(ways, gates * hidden, hidden)]
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
    "ms_inverse": ("Inverse", [], {}, "com.microsoft", 17),
    "ml_scaler": ("Identity", [], {}, "", 17),
}
_forms("map", _MAPS, _map)

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
    "ms_matmulnbits": ("MatMul", [_SQUARE], {}, "", 17),
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
    "dft": ("Identity", [], {}, "", 17),
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
    spectrum = net.add("STFT", [signal, net.constant(np.array(16)), net.constant(np.hanning(32).astype(np.float32))])
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
    y = net.add("RoiAlign", [net.features, boxes, net.ints(0, 1, 1)], output_height=4, output_width=4, **options)
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


def _body(nodes: Sequence[NodeProto], inputs: Sequence[tuple[str, int, Any]], outputs: Sequence[tuple[str, int, Any]]) -> Any:
    infos = [[helper.make_tensor_value_info(*value) for value in values] for values in (inputs, outputs)]
    return helper.make_graph(list(nodes), "body", *infos)


def _condition(net: Net) -> str:
    total = net.add("ReduceSum", [net.features], keepdims=0)
    return str(net.add("Greater", [total, net.constant(np.float32(40))]))


@form
def if_captured() -> ModelProto:
    """Both branches read the features and a weight of the graph around them."""
    net = Net()
    weight = net.weights(4, 1, 1)
    bodies = {
        name: _body([helper.make_node(op, [net.features, weight], ["r"])], [], [("r", TensorProto.FLOAT, (2, 4, 8, 8))])
        for name, op in (("then_branch", "Mul"), ("else_branch", "Add"))
    }
    return net.model(net.conv(net.add("If", [_condition(net)], **bodies)))


@form
def if_of_two_shapes() -> ModelProto:
    net = Net()
    bodies = {
        name: _body([helper.make_node("ReduceMax", [net.features], ["r"], axes=[2], keepdims=keep)], [], [("r", TensorProto.FLOAT, None)])
        for name, keep in (("then_branch", 1), ("else_branch", 0))
    }
    kept = net.add("If", [_condition(net)], **bodies)
    total = net.add("ReduceSum", [kept], keepdims=0)
    return net.model(net.add("Mul", [net.conv(net.features), total]))


@form
def loop_while() -> ModelProto:
    """A loop that runs as often as a value says, and keeps the shape of its state."""
    net = Net()
    count = net.add("Cast", [net.add("ReduceMax", [net.features], keepdims=0)], to=TensorProto.INT64)
    body = _body(
        [
            helper.make_node("Identity", ["going"], ["still"]),
            helper.make_node("Mul", ["state", net.constant(np.float32(0.9))], ["next"]),
        ],
        [("i", TensorProto.INT64, ()), ("going", TensorProto.BOOL, ()), ("state", TensorProto.FLOAT, None)],
        [("still", TensorProto.BOOL, ()), ("next", TensorProto.FLOAT, None)],
    )
    return net.model(net.conv(net.add("Loop", [count, "", net.features], body=body)))


@form
def loop_of_collected() -> ModelProto:
    """A loop whose result is as long as a value says."""
    net = Net()
    count = net.add("Cast", [net.add("ReduceMax", [net.features], keepdims=0)], to=TensorProto.INT64)
    more = net.add("Add", [count, net.constant(np.int64(1))])
    body = _body(
        [
            helper.make_node("Identity", ["going"], ["still"]),
            helper.make_node("ReduceMean", [net.features], ["mean"], axes=[2, 3], keepdims=0),
        ],
        [("i", TensorProto.INT64, ()), ("going", TensorProto.BOOL, ())],
        [("still", TensorProto.BOOL, ()), ("mean", TensorProto.FLOAT, (2, 4))],
    )
    collected = net.add("Loop", [more, ""], body=body)
    return net.model(net.conv(net.features), net.linear(net.add("ReduceMax", [collected], axes=[0], keepdims=0), 4))


@form
def scan() -> ModelProto:
    net = Net()
    body = _body(
        [helper.make_node("Add", ["s", "e"], ["n"]), helper.make_node("Tanh", ["n"], ["o"])],
        [("s", TensorProto.FLOAT, (2, 32)), ("e", TensorProto.FLOAT, (2, 32))],
        [("n", TensorProto.FLOAT, (2, 32)), ("o", TensorProto.FLOAT, (2, 32))],
    )
    start = net.constant(np.zeros((2, 32), np.float32))
    last, every = net.add("Scan", [start, net.steps(net.features)], 2, body=body, num_scan_inputs=1)
    return net.model(net.linear(every, 32), last)


@form
def nonzero_output() -> ModelProto:
    """An output whose shape the values decide."""
    net = Net()
    marked = net.add("Greater", [net.features, net.constant(np.float32(0.4))])
    places = net.add("Cast", [net.add("NonZero", [marked])], to=TensorProto.FLOAT)
    return net.model(net.conv(net.features), places)


@form
def nonzero_sum() -> ModelProto:
    """A shape that the values decide, between tensors of known shapes."""
    net = Net()
    flat = net.add("Reshape", [net.features, net.ints(-1)])
    places = net.add("Squeeze", [net.add("NonZero", [flat]), net.ints(0)])
    mean = net.add("ReduceMean", [net.add("Gather", [flat, places])], keepdims=0)
    return net.model(net.conv(net.add("Sub", [net.features, mean])))


@form
def unique() -> ModelProto:
    net = Net()
    rounded = net.add("Round", [net.features])
    values = net.add("Unique", [rounded])
    return net.model(net.conv(net.features), net.add("ReduceSum", [values], keepdims=1))


@form
def compress() -> ModelProto:
    net = Net()
    rows = net.add("Reshape", [net.features, net.ints(8, 64)])
    strong = net.add("Greater", [net.add("ReduceMax", [rows], axes=[1], keepdims=0), net.constant(np.float32(1))])
    chosen = net.add("Compress", [rows, strong], axis=0)
    return net.model(net.conv(net.features), net.linear(chosen, 64))


def _nms(options: tuple[bool, int]) -> ModelProto:
    limited, corner = options
    net = Net()
    boxes = net.add("Reshape", [net.conv(net.features), net.ints(2, 64, 4)])
    scores = net.add("Reshape", [net.add("Sigmoid", [net.features]), net.ints(2, 4, 64)])
    more = [net.constant(np.array([3])), net.constant(np.array([0.5], np.float32))]
    more += [net.constant(np.array([0.6], np.float32))] if limited else []
    chosen = net.add("NonMaxSuppression", [boxes, scores, *more], center_point_box=corner)
    picked = net.add("GatherND", [scores, chosen])
    return net.model(boxes, net.add("ReduceMax", [picked], keepdims=0) if limited else picked)


_forms("nms", {"all": (False, 0), "limited": (True, 0), "centers": (False, 1)}, _nms)


@form
def topk_computed() -> ModelProto:
    net = Net()
    count = net.add("Cast", [net.add("ReduceMax", [net.features], keepdims=1)], to=TensorProto.INT64)
    wanted = net.add("Max", [net.add("Reshape", [count, net.ints(1)]), net.ints(1)])
    values, _ = net.add("TopK", [net.rows(net.features), wanted], 2, axis=1)
    return net.model(net.linear(values, 32))


@form
def topk_on_an_axis() -> ModelProto:
    net = Net()
    values, places = net.add("TopK", [net.rows(net.features), net.ints(3)], 2, axis=1, largest=0)
    floats = net.add("Cast", [places], to=TensorProto.FLOAT)
    return net.model(net.linear(values, 32), floats)


@form
def sequence() -> ModelProto:
    net = Net()
    halves = net.add("SplitToSequence", [net.features, net.constant(np.array(2))], axis=1)
    longer = net.add("SequenceInsert", [halves, net.add("SequenceAt", [halves, net.constant(np.array(0))])])
    joined = net.add("ConcatFromSequence", [longer], axis=1)
    return net.model(net.conv(joined, 6))


@form
def sequence_map() -> ModelProto:
    net = Net()
    halves = net.add("SplitToSequence", [net.features, net.constant(np.array(2))], axis=1)
    body = _body([helper.make_node("Sin", ["e"], ["r"])], [("e", TensorProto.FLOAT, None)], [("r", TensorProto.FLOAT, None)])
    mapped = net.add("SequenceMap", [halves], body=body)
    return net.model(net.add("ConcatFromSequence", [mapped], axis=1))


@form
def optional() -> ModelProto:
    net = Net(18)
    boxed = net.add("Optional", [net.features])
    return net.model(net.conv(net.add("OptionalGetElement", [boxed])))


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
    y = net.add("ConvTranspose", [net.features, net.weights(4, 4 // options.get("group", 1), 3, 3)], **options)
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
    pooled = net.add("AveragePool", [net.add("MaxPool", [volume], kernel_shape=[2, 2, 2])], kernel_shape=[1, 2, 2])
    return net.model(net.add("GlobalAveragePool", [pooled]), pooled)


@form
def maxpool_indices() -> ModelProto:
    net = Net()
    values, places = net.add("MaxPool", [net.features], 2, kernel_shape=[2, 2], strides=[2, 2])
    back = net.add("MaxUnpool", [values, places], kernel_shape=[2, 2], strides=[2, 2])
    return net.model(net.conv(back))


@form
def integers() -> ModelProto:
    """Integers and booleans go into a kept node and come out of it."""
    net = Net()
    marked = net.add("Greater", [net.features, net.constant(np.float32(0.4))])
    numbers = net.add("Cast", [marked], to=TensorProto.INT64)
    shifted = net.add("BitShift", [net.add("Cast", [numbers], to=TensorProto.UINT8), net.constant(np.uint8(2))], direction="LEFT")
    return net.model(net.conv(net.add("Cast", [shifted], to=TensorProto.FLOAT)))


@form
def bitwise() -> ModelProto:
    net = Net(18)
    numbers = net.add("Cast", [net.features], to=TensorProto.INT32)
    y = net.add("BitwiseXor", [numbers, net.constant(np.int32(3))])
    return net.model(net.conv(net.add("Cast", [y], to=TensorProto.FLOAT)))


@form
def dynamic_quantized() -> ModelProto:
    net = Net()
    integers, scale, zero = net.add("DynamicQuantizeLinear", [net.rows(net.features)], 3)
    weight = net.constant(np.arange(160).reshape(32, 5) % 17 - 8, np.int8)
    product = net.add("MatMulInteger", [integers, weight, zero])
    return net.model(net.add("Mul", [net.add("Cast", [product], to=TensorProto.FLOAT), scale]))


@form
def function_call() -> ModelProto:
    """A function of the model whose body has an op that is kept."""
    net = Net()
    net.domains["own"] = 1
    function = helper.make_function(
        "own",
        "Curve",
        ["a"],
        ["b"],
        [helper.make_node("Det", ["a"], ["d"]), helper.make_node("Sinh", ["d"], ["b"])],
        [helper.make_opsetid("", 17)],
    )
    y = net.add("Curve", [net.features], domain="own")
    return net.model(net.conv(net.features), y, functions=[function])


@form
def two_behind_one() -> ModelProto:
    """Two kept nodes behind a value of unknown shape, which is computed once."""
    net = Net()
    flat = net.add("Reshape", [net.features, net.ints(-1)])
    places = net.add("Squeeze", [net.add("NonZero", [flat]), net.ints(0)])
    chosen = net.add("Gather", [flat, places])
    low, high = (net.add(op, [chosen], keepdims=0) for op in ("ReduceMin", "ReduceMax"))
    return net.model(net.conv(net.add("Div", [net.add("Sub", [net.features, low]), high])))


@form
def random_crop_of_sizes() -> ModelProto:
    """A slice whose ends are computed from values."""
    net = Net()
    end = net.add("Cast", [net.add("ReduceMax", [net.features], keepdims=1)], to=TensorProto.INT64)
    ends = net.add("Add", [net.add("Reshape", [end, net.ints(1)]), net.ints(2)])
    part = net.add("Slice", [net.features, net.ints(0), ends, net.ints(3)])
    return net.model(net.conv(net.features), net.add("ReduceMean", [part], keepdims=0))


for _name in ("map_ml_scaler", "rows_dft", "rows_ms_matmulnbits"):
    del FORMS[_name]

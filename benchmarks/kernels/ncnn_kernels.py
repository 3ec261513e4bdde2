"""Times the ops of a cost table in ncnn, which computes convolutions and inner products on integers.

A float image passes a ReLU before the copies, which leaves it in the layout that ncnn's kernels read.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kernels.copies import PASSES, Run, least_time, measure_copies, time_apart
from benchmarks.kernels.grid_small import small_grid
from qtrace.costs import FLOAT, INTEGER, Measurement, OpShape
from qtrace.targets.ncnn.writer import NcnnLayer, NcnnWriter, floats, integers, tagged

__all__ = ["grid", "measure", "open_network"]

_INTEGER_KINDS = ("conv2d", "linear")
# A convolution that reads and writes integers, with a scale for each channel or for each group.
_DENSE, _DEPTHWISE, _LINEAR = 102, 101, 2
_BINARY = {"add": 0, "sub": 1, "mul": 2, "div": 3}
_COUNT = 4  # copies of nothing

# Function -> layer and parameters.
_UNARY: dict[str, tuple[str, dict[int, Any]]] = {
    "relu": ("ReLU", {}),
    "clip": ("Clip", {0: 0.0, 1: 6.0}),
    "leaky_relu": ("ReLU", {0: 0.1}),
    "sigmoid": ("Sigmoid", {}),
    "tanh": ("TanH", {}),
    "hsigmoid": ("HardSigmoid", {}),
    "silu": ("Swish", {}),
    "hswish": ("HardSwish", {}),
    "exp": ("UnaryOp", {0: 7}),
    "softmax": ("Softmax", {0: -1, 1: 1}),
    "mean": ("Pooling", {0: 1, 4: 1}),
    "adaptive_avg_pool2d": ("Pooling", {0: 1, 4: 1}),
    "interpolate": ("Interp", {0: 1, 1: 2.0, 2: 2.0}),
    "interpolate, bilinear": ("Interp", {0: 2, 1: 2.0, 2: 2.0}),
    "reshape": ("Reshape", {0: -1}),
    "transpose": ("Permute", {0: 3}),
    "quantize": ("Quantize", {0: 1}),
}


class _NcnnNet:
    """An ncnn net under construction; the exporter's writer writes it."""

    def __init__(self) -> None:
        self._writer = NcnnWriter()
        self._weights: list[bytes] = []  # of the next layer
        self._random = np.random.default_rng(0)

    def layer(
        self, kind: str, bottoms: Sequence[str], params: dict[int, Any] | None = None, tops: int = 1
    ) -> list[str]:
        """Adds a layer, whose parameters were added before, and returns its blobs."""
        names = [self._writer.fresh("b") for _ in range(tops)]
        self._writer.layers.append(NcnnLayer(kind, list(bottoms), names, params or {}, self._weights))
        self._weights = []
        return names

    def floats(self, count: int, value: float | None = None) -> None:
        """Adds float parameters without a mark: random ones, or all of one value."""
        self._weights.append(floats(self._normal(count) if value is None else np.full(count, value)))

    def weight(self, count: int, integer: bool) -> None:
        """Adds a weight with the mark of its type."""
        if integer:
            self._weights.append(integers(self._random.integers(-127, 128, count).astype(np.int8)))
        else:
            self._weights.append(tagged(self._normal(count)))

    def _normal(self, count: int) -> np.ndarray:
        return self._random.normal(0, 0.1, count)

    def load(self) -> Any:
        """Returns the loaded net; None if ncnn refuses it."""
        import ncnn

        net = ncnn.Net()
        net.opt.num_threads = 1
        with tempfile.TemporaryDirectory() as folder:
            param, weights = Path(folder) / "net.param", Path(folder) / "net.bin"
            param.write_bytes(self._writer.param())
            weights.write_bytes(self._writer.bin())
            refused = net.load_param(str(param)) or net.load_model(str(weights))
        return None if refused else net


def grid() -> list[tuple[OpShape, str]]:
    """Returns the ops and forms that ncnn may have."""
    return [(op, form) for op, form in small_grid() if form == FLOAT or op.kind in _INTEGER_KINDS]


def measure(progress: Callable[[int, int], None]) -> tuple[list[Measurement], float]:
    """Returns the times of the ops, and the time that a run takes besides its ops.

    A kernel on integers gives floats at no cost that can be measured: that is the least time here.
    """
    pairs = [(op, form) for op, form in grid() if op.kind != "dequantize"]
    nothing = OpShape("nothing", ((1, 16),), ((1, 16),))
    few, many = open_network(nothing, FLOAT, 1), open_network(nothing, FLOAT, 1 + _COUNT)
    assert few is not None
    assert many is not None
    per_copy = max(time_apart(few, many) / _COUNT, 0.0)
    measurements = measure_copies(
        pairs, open_network, per_copy=per_copy, progress=lambda: progress(1, PASSES * len(pairs))
    )
    free = [op for op, _ in grid() if op.kind == "dequantize"]
    return [*measurements, *(Measurement(op, FLOAT, 3e-7) for op in free)], least_time(few)


def open_network(op: OpShape, form: str, copies: int) -> Run | None:
    """Loads a network of ``copies`` of an op; None if ncnn does not have it."""
    net, integer = _NcnnNet(), form == INTEGER
    data = op.inputs[:1] if op.stored else op.inputs
    sources = []
    for _ in data:
        (blob,) = net.layer("Input", [])
        (blob,) = net.layer("ReLU", [blob]) if op.kind != "matmul" else (blob,)
        if integer:
            net.floats(1, 20.0)
            (blob,) = net.layer("Quantize", [blob], {0: 1})
        sources.append(net.layer("Split", [blob], tops=copies) if copies > 1 else [blob])
    outputs = []
    for operands in zip(*sources, strict=True):
        output = _op(net, op, list(operands), integer)
        if output is None:
            return None
        outputs.append(output)
    loaded = net.load()
    return None if loaded is None else _runner(loaded, data, outputs)


def _runner(net: Any, shapes: Sequence[tuple[int, ...]], outputs: Sequence[str]) -> Run | None:
    """Returns what runs a net; None if it cannot compute its outputs."""
    import ncnn

    random = np.random.default_rng(0)
    values = [np.ascontiguousarray(random.normal(size=_sample(s)), np.float32) for s in shapes]
    # Copies: layers that work in place crash on the memory of an array.
    inputs = [(name, ncnn.Mat(v).clone()) for name, v in zip(net.input_names(), values, strict=True)]

    def run() -> list[Any]:
        extractor = net.create_extractor()
        for name, mat in inputs:
            extractor.input(name, mat)
        return [extractor.extract(name, 1) for name in outputs]

    return None if any(code for code, _ in run()) else run


def _sample(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape without the axis of the batch, which a matrix lacks."""
    return shape[1:] if len(shape) > 2 or shape[0] == 1 else shape


def _op(net: _NcnnNet, op: OpShape, sources: list[str], integer: bool) -> str | None:
    """Adds an op; returns None for one that ncnn does not have."""
    kind = op.kind
    if kind == "nothing":
        return sources[0]
    if kind in _UNARY:
        layer, params = _UNARY[kind]
        if kind == "softmax":
            params = {0: len(_sample(op.inputs[0])) - 1, 1: 1}
        if kind == "quantize":
            net.floats(1, 20.0)
        return net.layer(layer, sources, params)[0]
    if kind == "conv2d":
        return _conv(net, op, sources, integer)
    if kind == "linear":
        columns, length = op.weight
        net.weight(columns * length, integer)
        net.floats(columns)
        if integer:
            net.floats(columns, 1000.0)
            net.floats(1, 20.0)
        params = {0: columns, 1: 1, 2: columns * length, **({8: _LINEAR} if integer else {})}
        return net.layer("InnerProduct", sources, params)[0]
    if kind in _BINARY:
        return _binary(net, op, sources)
    return _other(net, op, sources)


def _conv(net: _NcnnNet, op: OpShape, sources: list[str], integer: bool) -> str:
    outputs, inputs, kernel, _ = op.weight
    count, depthwise = outputs * inputs * kernel**2, op.groups > 1
    params = {0: outputs, 1: kernel, 3: op.stride[0], 4: kernel // 2, 5: 1, 6: count, 9: 1}
    if depthwise:
        params[7] = op.groups
    net.weight(count, integer)
    net.floats(outputs)
    if integer:
        params[8] = _DEPTHWISE if depthwise else _DENSE
        net.floats(outputs, 1000.0)
        for _ in range(2):  # the scales of input and result
            net.floats(1, 20.0)
    return net.layer("ConvolutionDepthWise" if depthwise else "Convolution", sources, params)[0]


def _binary(net: _NcnnNet, op: OpShape, sources: list[str]) -> str:
    code = _BINARY[op.kind]
    if op.stored:
        net.floats(op.inputs[1][1])
        (other,) = net.layer("MemoryData", [], {0: 1, 1: 1, 2: op.inputs[1][1]})
        sources = [*sources, other]
    return net.layer("BinaryOp", sources, {0: code})[0]


def _other(net: _NcnnNet, op: OpShape, sources: list[str]) -> str | None:
    if op.kind == "matmul":
        return net.layer("MatMul", sources)[0]
    if op.kind == "concat":
        return net.layer("Concat", sources, {0: 0})[0]
    if op.kind in ("max_pool2d", "avg_pool2d"):
        window, stride = op.weight[0], op.stride[0]
        params = {0: int(op.kind == "avg_pool2d"), 1: window, 2: stride, 3: (window - 1) // 2, 5: 2}
        return net.layer("Pooling", sources, params)[0]
    if op.kind == "split":
        return net.layer("Crop", sources, {-23309: [0], -23310: [op.outputs[0][1]], -23311: [0]})[0]
    if op.kind == "conv_transpose2d":
        inputs, outputs, window, _ = op.weight
        count = inputs * outputs * window**2
        net.weight(count, False)
        net.floats(outputs)
        return net.layer("Deconvolution", sources, {0: outputs, 1: window, 3: op.stride[0], 5: 1, 6: count})[
            0
        ]
    return None

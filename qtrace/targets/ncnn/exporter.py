"""ncnn: ``.param`` and ``.bin`` with convolutions and linear layers of 8 bits, the rest in float.

For modules that were prepared for backend ncnn: integers from -127 to 127, ties away from zero. Each rounded
value has a blob ``SITE_int`` with its integers. A convolution whose result is only read as integers writes
that blob itself. A net computes one sample. Inputs have the names of the traced arguments, outputs the
names of the nodes that compute them.

Arithmetic, activation functions and reductions are layers without weights. Passes over the layers of a net
fuse activation functions and roundings, and copy branching blobs.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from megengine import Tensor

from qtrace.errors import ExportError
from qtrace.export.converted import (
    GATE,
    ConvertedGraph,
    ConvertedOp,
    PlainGraph,
    float_kinds,
    only_floats_read,
    refusal,
    site_expr,
)
from qtrace.export.format import Format
from qtrace.export.open_axes import resized
from qtrace.graph.interpreter import needed_nodes
from qtrace.graph.opaque import cure_for_opaque
from qtrace.graph.open_axes import SizedTypes, read_open_axes
from qtrace.graph.walk import is_float_tensor, unused_name
from qtrace.numerics import dequantize
from qtrace.ops import OpCall
from qtrace.preparation.model import QuantizedSite
from qtrace.scheme import QScheme
from qtrace.targets.ncnn.layers import LAYERS, NORMS
from qtrace.targets.ncnn.moves import MOVES
from qtrace.targets.ncnn.writer import ARRAY, NcnnLayer, NcnnWriter, Rounded, Weight, floats, fold, one_sample

Emitter = Callable[[NcnnWriter, OpCall], None]

# Operations and activation functions in the order of ncnn's numbers for them.
_BINARY = ("add", "sub", "mul", "div", "maximum", "minimum", "pow", "rsub", "rdiv", "rpow")
_UNARY = ("abs", "neg", "floor", "ceil", "square", "sqrt", "rsqrt", "exp", "log", "sin", "cos")
_REDUCTIONS = ("sum", "asum", "sumsq", "mean", "max", "min", "prod", "l1", "l2")
_ACTIVATIONS = ("", "ReLU", "LeakyReLU", "Clip", "Sigmoid", "Mish", "HardSwish")
# The bound that stands for none: the largest float32.
_LARGEST = float(np.finfo(np.float32).max)

_LOG = logging.getLogger("qtrace")
_PLURALS = {"weight": "weights", "bias": "biases"}


def _layer(kind: str, params: Callable[[OpCall], dict[int, Any]] = lambda call: {}) -> Emitter:
    """Emits a layer of one input, with parameters by ncnn's numbers."""

    def emit(w: NcnnWriter, call: OpCall) -> None:
        w.emit(kind, call, params(call), everywhere=True)

    return emit


def _prelu(w: NcnnWriter, call: OpCall) -> None:
    slope = w.stored(call.attrs["slope"], "slope").reshape(-1)
    w.emit("PReLU", call, {0: slope.size}, [floats(slope)])


def _pixel_shuffle(w: NcnnWriter, call: OpCall) -> None:
    w.emit("PixelShuffle", call, {0: call.attrs["factor"]})


def _bounds(call: OpCall) -> dict[int, Any]:
    low, high = (0.0, 6.0) if call.kind == "relu6" else (call.attrs["lower"], call.attrs["upper"])
    return {0: -_LARGEST if low is None else float(low), 1: _LARGEST if high is None else float(high)}


def _reversed(kind: str) -> int:
    """Returns ncnn's number for an operation with the operands exchanged."""
    name = f"r{kind}"
    return _BINARY.index(name if name in _BINARY else kind)


def _binary(w: NcnnWriter, call: OpCall) -> None:
    code = _BINARY.index(call.kind)
    if "scalar" in call.attrs:
        code = _reversed(call.kind) if call.attrs["side"] == "left" else code
        w.emit("BinaryOp", call, {0: code, 1: 1, 2: float(call.attrs["scalar"])}, everywhere=True)
        return
    names = [_operand(w, call, operand) for operand in call.attrs["operands"]]
    w.emit("BinaryOp", call, {0: code}, bottoms=names, everywhere=True)


# The largest exponent: a whole one becomes up to two products for each of its binary digits.
_LARGEST_EXPONENT = 1024
_SMALLEST = float(np.finfo(np.float32).tiny)


def _pow(w: NcnnWriter, call: OpCall) -> None:
    """Writes a power as products, or with a root, where the base may be 0 or negative.

    ncnn's own takes a logarithm: 2.4e38 for 0 and for negative numbers (1.0.20261020, measured). Its square
    root is right for both, and makes powers of x: ``x ** 1.7 = root * x ** 1.2``, and ``x ** -1.7 = x ** -1.2
    / root``. A negative power of 0 is NaN, as each division by 0 is in ncnn.
    """
    exponent = call.attrs.get("scalar")
    if exponent is not None and call.attrs["side"] == "left" and exponent > 0:
        _binary(w, call)
        return
    if exponent is None or call.attrs["side"] == "left":
        raise ExportError("ncnn raises only positive numbers to computed powers: write it as exp(log(x) * y)")
    if not abs(exponent) <= _LARGEST_EXPONENT:
        raise ExportError(
            f"it raises to {exponent:g}, and powers are written for ncnn with exponents from "
            f"-{_LARGEST_EXPONENT} to {_LARGEST_EXPONENT}: end the graph before it, or clip the exponent"
        )
    x, count = w.name(call.inputs[0]), abs(int(exponent))
    factor, divides = None, False
    if exponent != int(exponent):
        divides = exponent < 0
        value = w.layer("UnaryOp", [x], w.fresh(call.out.name), {0: _UNARY.index("sqrt")})
        if abs(exponent) != 0.5:
            factor = _positive_power(w, call, x, float(exponent - np.copysign(0.5, exponent)))
    elif exponent == 0:
        value = _positive_power(w, call, x, 0.0)
    elif exponent == -1:
        value, divides = x, True
    else:
        if exponent < 0:  # before the products, which are infinite for smaller values
            x = _with_number(w, call, "rdiv", x, 1.0)
        powers = {1: x}
        value = _product(w, call, powers, max(count // 2, 1))
        factor = _product(w, call, powers, count - count // 2) if count > 1 else None
    kind = "div" if divides else "mul"
    if factor is None:
        w.emit("BinaryOp", call, {0: _reversed(kind), 1: 1, 2: 1.0}, bottoms=[value], everywhere=True)
    else:
        w.emit("BinaryOp", call, {0: _BINARY.index(kind)}, bottoms=[factor, value], everywhere=True)


def _product(w: NcnnWriter, call: OpCall, powers: dict[int, str], count: int) -> str:
    """Returns the blob of a power of ``powers[1]``, and adds the products that it is made of."""
    if count not in powers:
        halves = [_product(w, call, powers, n) for n in (count // 2, count - count // 2)]
        powers[count] = w.layer("BinaryOp", halves, w.fresh(call.out.name), {0: _BINARY.index("mul")})
    return powers[count]


def _positive_power(w: NcnnWriter, call: OpCall, x: str, exponent: float) -> str:
    """Returns the blob of a power of ``x``, which stands for the smallest number where it is not positive."""
    return _with_number(w, call, "pow", _with_number(w, call, "maximum", x, _SMALLEST), exponent)


def _with_number(w: NcnnWriter, call: OpCall, kind: str, x: str, number: float) -> str:
    """Adds an operation on a blob and a number, and returns its blob."""
    return w.layer("BinaryOp", [x], w.fresh(call.out.name), {0: _BINARY.index(kind), 1: 1, 2: number})


def _operand(w: NcnnWriter, call: OpCall, operand: Any) -> str:
    """Returns a blob with an operand, in as many axes as the result has."""
    own = len(w.dims(call.out))
    value = operand if isinstance(operand, np.ndarray) else w.value(operand)
    shape = tuple(int(n) for n in (operand.shape if value is None else value.shape))
    full = (1,) * (len(call.out.shape) - len(shape)) + shape
    if value is None:
        return w.view(operand, full[len(full) - own :])
    if any(n > 1 and w.samples.holds(call.out, axis) for axis, n in enumerate(full)):
        raise ExportError(
            "a stored operand has a value for each sample of the batch, which ncnn cannot know: "
            "give it 1 in the first axis"
        )
    return w.memory(value.reshape(full[len(full) - own :]), w.fresh(call.out.name))


def _reduce(w: NcnnWriter, call: OpCall) -> None:
    axes = call.attrs["axis"]
    if axes is None:
        raise ExportError("it reduces the batch, which ncnn does not see: name the axes")
    keeps_axes = len(call.out.shape) == len(call.inputs[0].shape)
    _reduced(w, call, _REDUCTIONS.index(call.kind), axes, keeps_axes)


def _reduced(w: NcnnWriter, call: OpCall, operation: int, axes: Sequence[int], keeps_axes: bool) -> None:
    x = call.inputs[0]
    places = sorted(w.place(x, a) for a in axes)
    # 5: the axes are counted in a sample.
    params = {0: operation, 1: 0, ARRAY - 3: places, 4: int(keeps_axes), 5: 1}
    dims = [1 if n in places else size for n, size in enumerate(w.dims(x))]
    reduced = dims if keeps_axes else [size for n, size in enumerate(dims) if n not in places] or [1]
    same = tuple(reduced) == w.dims(call.out)
    top = call.out.name if same else w.fresh(call.out.name)
    w.put(call.out, w.layer("Reduction", [w.name(x)], top, params), reduced)


def _norm_axes(call: OpCall) -> tuple[list[int], int]:
    """Returns the axes of a vector norm and ncnn's number for it."""
    order, axis = call.attrs.get("ord"), call.attrs["axis"]
    axes = list(axis) if isinstance(axis, (tuple, list)) else [axis]
    name = f"l{2 if order is None else order:g}"
    if name not in _REDUCTIONS or None in axes:
        raise ExportError("ncnn has norms of order 1 and 2 over named axes: use one of them")
    return axes, _REDUCTIONS.index(name)


def _norm(w: NcnnWriter, call: OpCall) -> None:
    axes, operation = _norm_axes(call)
    _reduced(w, call, operation, axes, bool(call.attrs["keepdims"]))


def _normalize(w: NcnnWriter, call: OpCall) -> None:
    """Divides by the vector norm, which is ``eps`` at least."""
    axes, operation = _norm_axes(call)
    x = call.inputs[0]
    places, source = sorted(w.place(x, a) for a in axes), w.name(x)
    params = {0: operation, 1: 0, ARRAY - 3: places, 4: 1, 5: 1}
    length = w.layer("Reduction", [source], w.fresh(call.out.name), params)
    divisor = _with_number(w, call, "maximum", length, float(call.attrs["eps"]))
    w.emit("BinaryOp", call, {0: _BINARY.index("div")}, bottoms=[source, divisor], everywhere=True)


EMITTERS: dict[str, Emitter] = {
    **LAYERS,
    **MOVES,
    **NORMS,
    **dict.fromkeys(_BINARY, _binary),
    "pow": _pow,
    **dict.fromkeys(_UNARY, _layer("UnaryOp", lambda call: {0: _UNARY.index(call.kind)})),
    **dict.fromkeys(("relu6", "clip"), _layer("Clip", _bounds)),
    "relu": _layer("ReLU"),
    "leaky_relu": _layer("ReLU", lambda call: {0: float(call.attrs["negative_slope"])}),
    "prelu": _prelu,
    "sigmoid": _layer("Sigmoid"),
    "tanh": _layer("TanH"),
    "silu": _layer("Swish"),
    "gelu": _layer("GELU"),
    "hsigmoid": _layer("HardSigmoid", lambda call: dict(enumerate(GATE))),
    "hard_sigmoid": _layer("HardSigmoid", lambda call: {0: call.attrs["slope"], 1: call.attrs["offset"]}),
    "mish": _layer("Mish"),
    "gelu_tanh": _layer("GELU", lambda call: {0: 1}),
    "hswish": _layer("HardSwish", lambda call: dict(enumerate(GATE))),
    **dict.fromkeys(("sum", "mean", "max", "min", "prod"), _reduce),
    "norm": _norm,
    "normalize": _normalize,
    "pixel_shuffle": _pixel_shuffle,
}


def files(converted: ConvertedGraph, path: Path, allow_float: Iterable[str] = ()) -> dict[Path, bytes]:
    """Returns the net and its weights.

    Args:
        converted: the graph of a converted module.
        path: the path of the ``.param``; the weights get the suffix ``.bin``.
        allow_float: kinds of layers, such as ``conv2d``, that compute in float, with weights that the graph
            rounded. It may do so in a way that ncnn's int8 layers cannot express.

    Raises:
        ExportError: when ncnn cannot express a node or it rounds in another way, naming it.
    """
    if path.suffix == ".bin":
        raise ExportError(f"{path.name} is the name of the weights: name the net with the suffix .param.")
    floats = float_kinds(allow_float)
    writer = NcnnExporter(converted, floats).run()
    if fixing := find_fixing_layer(converted, floats):
        _LOG.warning(
            f"{path.name} runs only at the traced sizes, though the graph has open axes: {fixing} is "
            "written for these; a file of format onnx leaves them open."
        )
    return {path.with_suffix(".bin"): writer.bin(), path: writer.param()}


def find_fixing_layer(converted: ConvertedGraph | PlainGraph, floats: frozenset[str] = frozenset()) -> str:
    """Returns the first layer of a net that is another one at other sizes of the open axes; "" for none.

    Args:
        converted: the graph; without a record of open axes, no layer is looked for.
        floats: kinds of layers that compute in float.
    """
    record = read_open_axes(converted.module)
    axes = [] if record is None else [axis for axis in record.axes if axis.axis]
    if not axes:
        return ""
    own = NcnnExporter(converted, floats).run().param().decode().splitlines()
    for types in SizedTypes(converted.module).at_other_sizes(axes):
        with resized(types):
            try:
                others = NcnnExporter(converted, floats).run().param().decode().splitlines()
            except ExportError as error:
                return str(error).rstrip(".")
        for line, other in zip(own, others, strict=False):
            if line != other:
                return " ".join(line.split()[:2])
    return ""


FORMAT = Format(
    "ncnn",
    files,
    suffixes=(".param",),
    companions=(".bin",),
    options=("allow_float",),
    float_options=(),
    find_fixing_layer=find_fixing_layer,
    folds_norms=True,
)


class NcnnExporter:
    """Writes a converted graph as one ncnn net."""

    def __init__(self, converted: ConvertedGraph, floats: frozenset[str]) -> None:
        self.graph, self.floats = converted, floats
        self.writer = NcnnWriter()
        self.writer.values.update(self.graph.values)

    def run(self) -> NcnnWriter:
        """Writes all layers and returns their writer."""
        w = self.writer
        with one_sample(self.graph) as w.samples:
            for node, name in self.graph.inputs.items():
                w.names[node] = w.layer("Input", [], name)
            needed = needed_nodes(self.graph.module)
            shaping = needed_nodes(self.graph.module, shapes=True)
            for step in self.graph.steps:
                results = set(step.expr.outputs)
                if results & shaping and not self._fold(step) and results & needed:
                    self._emit(step)
            outputs = self._outputs()
        w.layers = fuse_activations(w.layers, outputs)
        w.layers = fuse_roundings(w.layers, outputs)
        w.layers += sink_unread(w.layers, outputs)
        w.layers = split_branches(w.layers)
        return w

    def _fold(self, step: ConvertedOp | QuantizedSite) -> bool:
        """Computes an op that reads no input of the graph; returns whether it is one."""
        results = fold(step, self.writer.values) if isinstance(step, ConvertedOp) else None
        if results is None:
            return False
        self.writer.values.update(zip(step.expr.outputs, results, strict=True))
        return True

    def _emit(self, step: ConvertedOp | QuantizedSite) -> None:
        expr = step.expr
        try:
            if isinstance(step, QuantizedSite):
                self._emit_site(step)
            elif any(is_float_tensor(n) for n in expr.outputs):
                self._emit_op(step)
        except ExportError as error:
            about = site_expr(step.source, step.value) if isinstance(step, QuantizedSite) else expr
            raise refusal(f"{expr.outputs[0].name}: {error}", about) from error

    def _emit_op(self, op: ConvertedOp) -> None:
        w, call = self.writer, op.call
        if call is None or call.kind not in EMITTERS:
            cure = cure_for_opaque(op.expr) or "end the graph before it, or write it with ops that have one"
            raise ExportError(f"it cannot become ncnn: {cure}")
        w.moving = op.expr.outputs[0].name in self.graph.carried
        EMITTERS[call.kind](w, call)
        w.moving = False
        w.samples.follow(call)
        for node in op.expr.outputs:
            qparams = self.graph.carried.get(node.name)
            if qparams is not None:
                w.rounded[node] = Rounded(node.name, qparams)

    def _emit_site(self, site: QuantizedSite) -> None:
        w, out, value = self.writer, site.value, self.writer.value(site.source)
        if site.source in w.samples.inside:
            w.samples.inside[out] = w.samples.inside[site.source]
        if site.sort == "activation":
            if value is not None:
                w.values[out] = dequantize(site.integers(value), site.qparams)
                return
            _check(site.name, site.qparams.scheme, 8)
            w.names[out] = w.raw(site.source)
            if site.source in w.packed:
                w.packed[out] = w.packed[site.source]
            w.rounded[out] = Rounded(site.name, site.qparams)
            w.integer_blob(out)
            return
        if value is None:
            raise ExportError(
                f"its {site.sort} is computed, and ncnn stores {_PLURALS[site.sort]} in the file: set "
                "quantize: false for its layer"
            )
        if site.sort == "weight":
            self._weight(site, value)
        else:  # ncnn computes biases in float: the rounded bias is stored as a float
            w.values[out] = site.rounded_bias(value)

    def _weight(self, site: QuantizedSite, value: np.ndarray) -> None:
        w, out, qparams, axes = self.writer, site.value, site.qparams, site.decision.channel_axes
        if only_floats_read(out, self.floats):
            w.values[out] = site.fake_quant(Tensor(value)).numpy()
            return
        scheme = qparams.scheme
        _check(site.name, scheme, scheme.bits, ", or name the kind of its layer in allow_float")
        integers = site.integers(value).astype(np.int8)
        shape = [n if i in axes else 1 for i, n in enumerate(value.shape)]
        scale = qparams.scale.reshape(shape) if qparams.scale.ndim else qparams.scale
        dequantized = (integers * scale).astype(np.float32)
        w.weights[out] = Weight(integers, qparams.scale, dequantized)
        w.values[out] = dequantized

    def _outputs(self) -> set[str]:
        """Gives each output a blob of its own, in the order of the graph; returns the blobs' names."""
        w = self.writer
        inputs = {top for layer in w.layers if layer.kind == "Input" for top in layer.tops}
        nodes = self.graph.outputs
        outputs: set[str] = set()
        renamed: dict[str, str] = {}  # what is returned twice is one blob, whatever its name has become
        for node in nodes:
            blob, name = w.name(node), self.graph.model.unrounded_name(node)
            if len(nodes) == 1 and blob == name and not any(blob in layer.bottoms for layer in w.layers):
                return {blob}
            taken = inputs | outputs
            name = unused_name(f"{name}_output", taken.__contains__) if name in taken else name
            blobs = {blob for layer in w.layers for blob in (*layer.bottoms, *layer.tops)}
            if name in blobs:
                renamed[name] = unused_name(f"{name}_float", blobs.__contains__)
                _rename(w.layers, name, renamed[name])
            w.layers.append(NcnnLayer("Noop", [_follow(renamed, blob)], [name]))
            outputs.add(name)
        return outputs


def _follow(renamed: Mapping[str, str], blob: str) -> str:
    """Returns the name that a blob has after all renames."""
    while blob in renamed:
        blob = renamed[blob]
    return blob


def _rename(layers: list[NcnnLayer], old: str, new: str) -> None:
    for layer in layers:
        layer.bottoms = [new if b == old else b for b in layer.bottoms]
        layer.tops = [new if t == old else t for t in layer.tops]


def _check(site: str, scheme: QScheme, bits: int, otherwise: str = "") -> None:
    """Refuses a scheme that ncnn does not compute; ``otherwise`` is another cure."""
    problems = (
        (scheme.bits != bits or bits > 8, "its integers have 8 bits"),
        (not scheme.symmetric or not scheme.signed, "its integers are signed and symmetric"),
        (scheme.bits == 8 and not scheme.narrow, "its integers begin at -127"),
        (scheme.rounding != "half_away", "it rounds half away from zero"),
    )
    reason = next((reason for applies, reason in problems if applies), "")
    if reason:
        raise ExportError(
            f"site {site} is {scheme.describe()}, which ncnn does not compute ({reason}): prepare the module "
            f"with the recipe backend/ncnn{otherwise}"
        )


_LAYERS = ("Convolution", "ConvolutionDepthWise", "Deconvolution", "DeconvolutionDepthWise", "InnerProduct")
_ACTIVATION, _INT8 = 9, 8  # ncnn's numbers of a layer's parameters


def fuse_activations(layers: list[NcnnLayer], outputs: set[str]) -> list[NcnnLayer]:
    """Moves an activation function into the layer before it if nothing else reads that layer."""
    return _fuse(layers, outputs, _take_activation)


def fuse_roundings(layers: list[NcnnLayer], outputs: set[str]) -> list[NcnnLayer]:
    """Lets a convolution of 8 bits write integers if its result is only rounded."""
    return _fuse(layers, outputs, _take_rounding)


def _fuse(layers: list[NcnnLayer], outputs: set[str], take: Any) -> list[NcnnLayer]:
    readers = Counter(b for layer in layers for b in layer.bottoms)
    producers = {layer.tops[0]: layer for layer in layers}
    unfused: list[NcnnLayer] = []
    for layer in layers:
        blob = layer.bottoms[0] if len(layer.bottoms) == 1 else ""
        before = producers.get(blob)
        alone = readers[blob] == 1 and blob not in outputs
        if before is not None and alone and take(before, layer, readers):
            before.tops = list(layer.tops)
            producers[layer.tops[0]] = before
        else:
            unfused.append(layer)
    return unfused


def _take_activation(before: NcnnLayer, layer: NcnnLayer, readers: Counter[str]) -> bool:
    if before.kind not in _LAYERS or _ACTIVATION in before.params or layer.kind not in _ACTIVATIONS:
        return False
    arguments = [v for v in layer.params.values() if layer.kind != "ReLU" or v]
    leaky = layer.kind == "ReLU" and bool(arguments)
    before.params[_ACTIVATION] = _ACTIVATIONS.index("LeakyReLU" if leaky else layer.kind)
    if arguments:
        before.params[ARRAY - _ACTIVATION - 1] = arguments
    return True


def _take_rounding(before: NcnnLayer, layer: NcnnLayer, readers: Counter[str]) -> bool:
    integer = before.kind in ("Convolution", "ConvolutionDepthWise") and before.params.get(_INT8, 0) in (1, 2)
    # Unread integers are in the file for inspection only: the layer's result is read as floats.
    if layer.kind != "Quantize" or not integer or not readers[layer.tops[0]]:
        return False
    before.params[_INT8] += 100
    before.weights += layer.weights
    return True


def sink_unread(layers: list[NcnnLayer], outputs: set[str]) -> list[NcnnLayer]:
    """Returns Noop layers for the blobs that no layer reads: ncnn takes unread blobs for outputs.

    Such blobs are inputs, parts of a split, and integers that are in the file for inspection.
    """
    read = {blob for layer in layers for blob in layer.bottoms} | outputs
    return [NcnnLayer("Noop", [top], []) for layer in layers for top in layer.tops if top not in read]


def split_branches(layers: list[NcnnLayer]) -> list[NcnnLayer]:
    """Copies every blob that several layers read: an ncnn blob has one reader."""
    readers = Counter(b for layer in layers for b in layer.bottoms)
    copied: Counter[str] = Counter()
    result: list[NcnnLayer] = []
    for layer in layers:
        for index, blob in enumerate(layer.bottoms):
            if readers[blob] > 1:
                layer.bottoms[index] = f"{blob}_copy{copied[blob]}"
                copied[blob] += 1
        result.append(layer)
        for top in layer.tops:
            if readers[top] > 1:
                copies = [f"{top}_copy{i}" for i in range(readers[top])]
                result.append(NcnnLayer("Split", [top], copies))
    return result

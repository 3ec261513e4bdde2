"""A dump for MegEngine's own runtimes, whose convolutions, linear layers and sums compute on int8.

For modules that were prepared for backend megengine. The file is what ``megengine.jit.trace(...).dump``
writes; ``megengine.utils.comp_graph_tools.GraphInference`` and MegEngine Lite load it. Its usual suffix is
``.mge``, like the suffix of ``qtrace.save``, so this format has to be named: ``format="megengine"``.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import megengine.functional as F
import numpy as np
from megengine import Tensor
from megengine.core.tensor import dtype
from megengine.functional.elemwise import _elemwise_multi_type
from megengine.functional.quantized import conv_bias_activation, conv_transpose2d
from megengine.jit import trace

from qtrace import ops
from qtrace.errors import ExportError
from qtrace.export.converted import ConvertedGraph, float_kinds, located, only_floats_read
from qtrace.export.format import Format
from qtrace.graph.interpreter import needed_nodes, static_nodes
from qtrace.graph.types import Apply, Constant, Expr, GetAttr, Node, TensorNode
from qtrace.graph.walk import exprs, is_float_tensor, op_label, unused_name, users
from qtrace.ops import OpCall
from qtrace.preparation.model import QuantizedSite
from qtrace.scheme import QScheme

# Op kinds that MegEngine computes on integers because they only move values.
_MOVING = "max_pool2d adaptive_max_pool2d reshape flatten transpose swapaxes expand_dims squeeze getitem"
_MOVES = frozenset([*_MOVING.split(), "split", "pad", "concat", "identity", "dropout"])


class QuantizedGraph:
    """Computes what a converted graph computes, with integers between its int8 ops.

    A value is float32 or, where the graph has integers, a tensor of type qint8. Convolutions, linear layers
    and sums compute on integers, and moves keep them; all other ops read floats. The first run computes
    the integers of weights and biases and keeps them, so that a trace of the second run has them as
    constants.

    Args:
        converted: the graph.
        floats: kinds of layers that compute in float, with weights rounded in any way.

    Raises:
        ExportError: when a site has another scheme than MegEngine's kernels.
    """

    def __init__(self, converted: ConvertedGraph, floats: frozenset[str] = frozenset()) -> None:
        self.graph = converted
        self.attributes = {
            expr.outputs[0]: self.graph.attribute(expr)
            for expr in exprs(converted.module)
            if isinstance(expr, (GetAttr, Constant))
        }
        self.needed = needed_nodes(converted.module, shapes=True)  # a dump leaves the other tensors out
        self.static = static_nodes(self.graph.module)  # a dump folds them, and their names
        self.integers: list[str] = []
        self.merged: dict[str, str] = {}
        self.values: dict[Node, Any] = {}
        self.first_names: dict[int, str] = {}
        self.rounded: dict[tuple[int, float], Tensor] = {}
        self.merged_results: dict[tuple[Any, ...], Sequence[Any]] = {}
        self.constants: dict[tuple[str, int], Tensor] = {}
        self.by_content: dict[tuple[Any, ...], Tensor] = {}
        self.floating = {
            site.value
            for site in self.graph.sites
            if site.sort != "activation" and only_floats_read(site.value, floats)
        }
        for site in self.graph.sites:
            if site.sort != "bias" and site.value not in self.floating:
                _check(site.name, site.qparams.scheme, site.sort == "weight")

    def run(self, *inputs: Tensor) -> list[Tensor]:
        """Computes the outputs of the graph as floats.

        Sets `integers` to the names of the integer tensors. MegEngine merges ops that compute the same from
        the same inputs, and keeps one name: `merged` maps each lost name to the one that is kept.
        """
        graph = self.graph
        self.integers, self.merged, self.first_names, self.rounded, self.merged_results = [], {}, {}, {}, {}
        self.values = {graph.module.graph.inputs[0]: graph.module, **self.attributes}
        self.values.update(zip(graph.inputs, inputs, strict=True))
        for step in graph.steps:
            with located(step.expr):
                if isinstance(step, QuantizedSite):
                    self.values[step.value] = self._site(step)
                else:
                    self._compute(step.expr, step.call)
        return [_as_float(self.values[n]) for n in graph.outputs]

    def _compute(self, expr: Expr, call: OpCall | None) -> None:
        values = self.values
        result = None if call is None else self._integer_op(call)
        results = self._as_traced(expr, call) if result is None else [result]
        key = (*_computation_key(expr), *(id(values[n]) for n in expr.inputs), *map(_scale_of, results))
        results = self.merged_results.setdefault(key, results)
        for out, value in zip(expr.outputs, results, strict=True):
            values[out] = self._carry(out, value)

    def _site(self, site: QuantizedSite) -> Tensor:
        """Returns the rounded value of a site; a value that a kernel has already rounded stays."""
        expr, value = site.expr, self.values[site.source]
        if site.sort == "bias" or site.value in self.floating:
            return self._keep(
                "value", expr, lambda: expr.interpret(*(self.values[n] for n in expr.inputs))[0]
            )
        scale = site.qparams.scale.item()
        if isinstance(site.source.expr, (GetAttr, Constant)):
            return self._keep("value", expr, lambda: _stored(site, value.numpy(), scale))
        if site.sort == "weight":
            raise ExportError(
                f"site {site.name}: its weight is computed, and MegEngine's kernels take stored ones: set "
                "quantize: false for its layer."
            )
        if not _is_integer(value) or _scale(value) != scale:
            key = (id(value), scale)
            if key not in self.rounded:
                self.rounded[key] = _as_float(value).astype(dtype.qint8(scale))
            value = self.rounded[key]
        return self._name(value, site.name) if site.value in self.needed else value

    def _keep(self, role: str, expr: Expr, compute: Callable[[], Tensor]) -> Tensor:
        key = (role, expr)
        if key not in self.constants:
            tensor = compute()
            content = (tensor.shape, str(tensor.dtype), _scale_of(tensor), tensor.numpy().tobytes())
            self.constants[key] = self.by_content.setdefault(content, tensor)
        return self.constants[key]

    def _carry(self, node: Node, value: Any) -> Any:
        """Returns the value of ``node``: named integers if the node carries integers."""
        qparams = self.graph.carried.get(node.name)
        if qparams is None:
            return value
        scale = qparams.scale.item()
        if not _is_integer(value) or _scale(value) != scale:
            value = _as_float(value).astype(dtype.qint8(scale))
        named = node.name in self.graph.moved and node in self.needed and node not in self.static
        return self._name(value, node.name) if named else value

    def _name(self, value: Tensor, name: str) -> Tensor:
        self.integers.append(name)
        first = self.first_names.setdefault(id(value), name)
        if first == name:
            value.name = f"{name}_int"
        else:
            self.merged[name] = first
        return value

    def _as_traced(self, expr: Expr, call: OpCall | None) -> Sequence[Any]:
        """Runs the op of the graph: on integers if it only moves them, else on floats."""
        values = [self.values[n] for n in expr.inputs]
        integer = [v for v in values if _is_integer(v)]
        alike = len({_scale(v) for v in integer}) == 1
        whole = len(integer) == sum(is_float_tensor(n) for n in expr.inputs)
        if not (call is not None and call.kind in _MOVES and alike and whole):
            values = [_as_float(v) for v in values]
        results = expr.interpret(*values)
        if results is None:
            raise ExportError(
                f"{expr.outputs[0].name}: {op_label(expr)} gives nothing that could be dumped: end "
                "the graph before it."
            )
        return results

    # -- ops with kernels for integers --------------------------------------------------------------

    def _integer_op(self, call: OpCall) -> Tensor | None:
        """Returns the result of an int8 kernel; None if no kernel computes this call."""
        kernel = _KERNELS.get(call.kind)
        weight = [] if call.weight is None else [call.weight]
        operands = [self.values[n] for n in (*call.inputs, *weight)]
        if kernel is None or not all(_is_integer(v) for v in operands):
            return None
        return kernel(self, call, *operands)

    def _ahead(self, call: OpCall, relu: bool = True) -> tuple[float | None, bool]:
        """Returns the scale of the site that rounds the result, if any, and whether a relu is between."""
        reader = self._only_reader(call.out)
        following = None if reader is None or not relu else self.graph.call(reader)
        through = following is not None and following.kind == "relu"
        if following is not None and through:
            reader = self._only_reader(following.out)
        site = None if reader is None else self.graph.site_of(reader.outputs[0])
        if site is None or site.sort != "activation":
            return None, False
        return site.qparams.scale.item(), through

    def _only_reader(self, node: TensorNode) -> Expr | None:
        readers = list(users(node))
        leaves = any(n is node for n in self.graph.outputs)
        return readers[0] if len(readers) == 1 and not leaves else None

    def _conv(self, call: OpCall, x: Tensor, weight: Tensor) -> Tensor:
        options = {k: call.attrs[k] for k in ("stride", "padding", "dilation", "groups")}
        return self._kernel(call, x, weight, options)

    def _kernel(self, call: OpCall, x: Tensor, weight: Tensor, options: dict[str, Any]) -> Tensor:
        product = dtype.qint32(_scale(x) * _scale(weight))
        bias = self._keep("bias", call.expr, lambda: self._bias(call, weight, product))
        scale, relu = self._ahead(call)
        mode = "relu" if relu else "identity"
        kind = product if scale is None else dtype.qint8(scale)
        result = conv_bias_activation(x, weight, bias, kind, nonlinear_mode=mode, **options)
        return _as_float(result) if scale is None else result

    def _bias(self, call: OpCall, weight: Tensor, product: Any) -> Tensor:
        if call.bias is None:
            value = np.zeros(int(np.prod(weight.shape[:-3])), np.float32)
        else:
            value = self.values[call.bias].numpy()
        return Tensor(value.reshape(1, -1, 1, 1)).astype(product)

    def _linear(self, call: OpCall, x: Tensor, weight: Tensor) -> Tensor:
        """Computes a linear layer as a convolution of single pixels, for which there is a kernel."""
        outputs, width = (int(n) for n in weight.shape)
        front = [int(n) for n in call.inputs[0].shape[1:-1]]
        pixels = F.reshape(x, (-1, width, 1, 1))
        weight = self._keep("weight", call.expr, lambda: F.reshape(weight, (outputs, width, 1, 1)))
        return F.reshape(self._kernel(call, pixels, weight, {}), (-1, *front, outputs))

    def _transposed(self, call: OpCall, x: Tensor, weight: Tensor) -> Tensor | None:
        a, (scale, _) = call.attrs, self._ahead(call, relu=False)
        plain = call.bias is None and a["groups"] == 1 and not any(a["output_padding"])
        if scale is None or not plain or a["dilation"] != (1, 1):
            return None  # MegEngine's kernel lacks bias, groups and float output
        return conv_transpose2d(x, weight, None, dtype.qint8(scale), a["stride"], a["padding"])

    def _add(self, call: OpCall, *inputs: Tensor) -> Tensor | None:
        scale, relu = self._ahead(call)
        if len(inputs) != 2 or scale is None or "scalar" in call.attrs:
            return None
        if tuple(call.inputs[0].shape) != tuple(call.inputs[1].shape):
            return None
        mode = "qfuse_add_relu" if relu else "qadd"
        return _elemwise_multi_type(*inputs, mode=mode, dtype=dtype.qint8(scale))

    def _relu(self, call: OpCall, x: Tensor) -> Tensor | None:
        node = call.inputs[0]
        if self.graph.site_of(node) is None and node.name not in self.graph.carried:
            return x  # the kernel before it computed the relu
        scale, _ = self._ahead(call, relu=False)
        return None if scale is None else _elemwise_multi_type(x, mode="qrelu", dtype=dtype.qint8(scale))


_KERNELS: dict[str, Callable[..., Tensor | None]] = {
    "conv2d": QuantizedGraph._conv,
    "conv_transpose2d": QuantizedGraph._transposed,
    "linear": QuantizedGraph._linear,
    "add": QuantizedGraph._add,
    "relu": QuantizedGraph._relu,
}


def _computation_key(expr: Expr) -> tuple[Any, ...]:
    """Returns a key of the computation of ``expr``, equal for exprs that MegEngine may merge."""
    state = repr(expr.opdef.__getstate__()) if isinstance(expr, Apply) else ""
    return ops.target_key(expr), state, repr(expr.const_val), repr(expr.arg_def)


def _scale_of(value: Any) -> float | None:
    return _scale(value) if _is_integer(value) else None


def _is_integer(value: Any) -> bool:
    return isinstance(value, Tensor) and dtype.is_quantize(value.dtype)


def _scale(value: Tensor) -> float:
    return float(dtype.get_scale(value.dtype))


def _stored(site: QuantizedSite, value: np.ndarray, scale: float) -> Tensor:
    integers = site.integers(value).astype(np.float32)
    return Tensor(integers * np.float32(scale)).astype(dtype.qint8(scale))


def _as_float(value: Any) -> Any:
    return value.astype("float32") if _is_integer(value) else value


def _check(site: str, scheme: QScheme, stored: bool) -> None:
    """Refuses a scheme that MegEngine's int8 kernels do not compute."""
    problems = (
        (scheme.per_channel, "they have one scale for each tensor"),
        (not scheme.symmetric or not scheme.signed, "their integers are signed and symmetric"),
        (not stored and scheme.bits != 8, "their integers have 8 bits"),
        (scheme.bits > 8, "weights have 8 bits at most"),
        (not stored and scheme.narrow, "they saturate at -128"),
        (scheme.rounding != "half_away", "they round half away from zero"),
    )
    reason = next((reason for applies, reason in problems if applies), "")
    if reason:
        raise ExportError(
            f"site {site} is {scheme.describe()}, which MegEngine's int8 kernels do not compute ({reason}): "
            "prepare the module with the recipe backend/megengine"
            + (", or name the kind of its layer in allow_float." if stored else ".")
        )


def files(converted: ConvertedGraph, path: Path, allow_float: Iterable[str] = ()) -> dict[Path, bytes]:
    """Returns the dump.

    Args:
        converted: the graph of a converted module.
        path: the path of the dump.
        allow_float: kinds of layers, such as ``conv2d``, that compute in float, with weights that the graph
            rounded. It may do so in a way that MegEngine's int8 kernels cannot express.

    Raises:
        ExportError: when a site has another scheme than MegEngine's int8 kernels, naming it, or an op cannot
            be dumped.
    """
    graph = QuantizedGraph(converted, float_kinds(allow_float))
    names = list(graph.graph.inputs.values())
    outputs = _output_names(graph.graph, names)
    samples = [_sample(node) for node in graph.graph.inputs]
    traced = trace(lambda *inputs: graph.run(*inputs), symbolic=True, capture_as_const=True)
    stream = io.BytesIO()
    try:
        # The plain run computes and keeps the constants; the traced run records them.
        for result in (*graph.run(*samples), *traced(*samples)):
            result.numpy()  # a kernel's error appears here at the latest
        integers = list(dict.fromkeys(graph.integers))
        facts = {"qtrace": 1, "inputs": names, "integers": integers, "merged": graph.merged}
        # As text, so that a reader need not unpickle it.
        traced.dump(stream, arg_names=names, output_names=outputs, user_info=json.dumps(facts))
    except (RuntimeError, AssertionError, TypeError, ValueError) as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ExportError(
            f"MegEngine cannot dump the graph: {line}. End the graph before the op that it names."
        ) from error
    return {path: stream.getvalue()}


# Chosen by name: .mge stands for a model that qtrace.save wrote.
FORMAT = Format("megengine", files, suffixes=(".mge",), options=("allow_float",), runs_graph=True)


def _sample(node: TensorNode) -> Tensor:
    return Tensor(np.zeros([int(n) for n in node.shape], np.dtype(node.dtype)))


def _output_names(graph: ConvertedGraph, used: list[str]) -> list[str]:
    """Returns a unique name for each output of the graph."""
    names: list[str] = []
    for node in graph.outputs:
        name, taken = graph.site_name(node), (*used, *names)
        names.append(unused_name(f"{name}_output", taken.__contains__) if name in taken else name)
    return names

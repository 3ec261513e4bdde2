"""MSCGraph's way back: roundings, and a traced module of a document."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import megengine.functional as F
import numpy as np
from megengine import Parameter, Tensor
from megengine.core._imperative_rt import ops as kernels
from megengine.module import Module

from qtrace.errors import GraphError, QtraceError, SchemeError
from qtrace.fakequant.fixed import FixedFakeQuant
from qtrace.fakequant.following.bias import BiasQuant
from qtrace.graph.builder import GraphBuilder
from qtrace.graph.files import allowlist
from qtrace.graph.files.allowlist import ENTRY, AllowList, DamagedError, RefusedError, shown
from qtrace.graph.files.module_attributes import check_attributes
from qtrace.graph.files.plain_values import make_op, op_state
from qtrace.graph.open_axes import OpenAxes, OpenAxis, write_open_axes
from qtrace.graph.types import TensorNode, TracedModule
from qtrace.process import on_engine_thread
from qtrace.scheme import QParams, QScheme
from qtrace.targets.msc.calls import BOOKKEEPING, node_digest, read_dtype, read_value, stored_place
from qtrace.targets.msc.document import MSCGraph, MSCNode, MSCTensor
from qtrace.targets.msc.kinds import standard_calls

BIAS_SCHEME = "int32 sym"
"""The scheme of biases in documents: integers at the product of two scales."""

_CONTAINER = "qsites"
_WORDS = re.compile(
    r"(u?)int(\d{1,2}) (sym|affine)(?: per-channel\((-?\d{1,2})\))?( narrow)?( pow2)?(?: (half-\w+))?\Z"
)


class Roundings:
    """Puts the fake quants of a document into the graph that is built from it.

    Args:
        graph: the document.
        builder: builds the graph.
    """

    def __init__(self, graph: MSCGraph, builder: GraphBuilder) -> None:
        self._builder = builder
        self._parameters: dict[str, dict[str, Any]] = {}  # site -> its parameters in the document
        self._texts: dict[MSCNode, dict[str, Any]] = {}
        self._rounded: dict[tuple[TensorNode, str], TensorNode] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for node in graph.nodes:
            for key, text in node.attrs.items():
                if key.startswith("qparams_") and '"site"' in text:
                    self._remember(text)

    def _remember(self, text: str) -> None:
        try:
            parameters = json.loads(text)
            self._parameters.setdefault(parameters["site"], parameters)
        except (ValueError, LookupError, TypeError, RecursionError):  # where it is needed it is missed
            return

    def apply(self, node: MSCNode, key: str, value: TensorNode) -> TensorNode:
        """Returns the node of a value as ``node`` reads it: rounded, or as it is.

        Args:
            node: the reader.
            key: ``input_0`` and so on, the type of a weight, or ``graph_output_0`` and so on.
            value: the node of the value.

        Raises:
            GraphError: when the attributes do not say how it is rounded; the message is a clause.
        """
        for site, shape in self._steps(node, key):
            parameters = self._known(site)
            if parameters.get("scheme") == BIAS_SCHEME:
                continue  # `stored_value` has rounded it
            if (value, site) not in self._rounded:
                path = f"{_CONTAINER}.{site}"
                if site not in self._shapes:
                    self._builder.add_module(path, _fake_quant(site, parameters, shape))
                    self._shapes[site] = shape
                elif self._shapes[site] != shape:
                    raise GraphError(f"site {site} has scales of the shapes {self._shapes[site]} and {shape}")
                rounded = self._builder.call_module(path, None, value, name=f"{site}_q")
                self._rounded[value, site] = rounded
            value = self._rounded[value, site]
        return value

    def stored_value(self, node: MSCNode, key: str, value: np.ndarray) -> np.ndarray:
        """Returns a stored tensor as the module stores it: a bias that is rounded to integers is so already.

        Args:
            node: the reader.
            key: the type of the weight.
            value: the float value.

        Raises:
            GraphError: when the attributes do not say how it is rounded; the message is a clause.
        """
        for site, shape in self._steps(node, key):
            parameters = self._known(site)
            if parameters.get("scheme") != BIAS_SCHEME:
                continue
            scale = _numbers(parameters.get("scale"), site)
            fits = scale.ndim == 0 or scale.size == math.prod(shape)
            if value.dtype != np.float32 or not fits or value.shape != shape:
                raise GraphError(
                    f"site {site} has {scale.size} scales for a bias of shape {list(value.shape)}"
                )
            # As with one scale per tensor, or one per channel, of input and weight.
            ones = np.ones((1, 1) if scale.ndim else (), np.float32)
            product = scale.reshape(shape) if scale.ndim else scale
            value = BiasQuant(site, shape).quantize(Tensor(value), Tensor(product), Tensor(ones)).numpy()
            value = value.reshape(shape)
        return value

    def _known(self, site: str) -> dict[str, Any]:
        if site not in self._parameters:
            raise GraphError(f"it is rounded at site {site!r}, whose scale is nowhere in the document")
        return self._parameters[site]

    def _steps(self, node: MSCNode, key: str) -> list[tuple[str, tuple[int, ...]]]:
        if "roundings" not in node.attrs:
            return []
        try:
            if node not in self._texts:
                self._texts[node] = dict(json.loads(node.attrs["roundings"]))
            pairs = [(site, tuple(shape)) for site, shape in self._texts[node].get(key, [])]
            known = all(isinstance(s, str) and re.fullmatch(r"\w+", s) for s, _ in pairs)
        except (ValueError, TypeError, RecursionError) as error:
            raise GraphError(f"its attribute 'roundings' is damaged ({type(error).__name__})") from error
        if not known or any(type(n) is not int or n < 0 for _, shape in pairs for n in shape):
            raise GraphError("its attribute 'roundings' lacks sites with shapes")
        return pairs


def _fake_quant(site: str, parameters: dict[str, Any], shape: tuple[int, ...]) -> FixedFakeQuant:
    try:
        scheme = read_scheme(parameters.get("scheme"))
        zero_point = np.asarray(parameters.get("zero_point"))
        qparams = QParams(scheme, _numbers(parameters.get("scale"), site), zero_point)
        fake_quant = FixedFakeQuant(site, scheme, shape=shape)
        fake_quant.set_qparams(qparams)
    except (SchemeError, ValueError) as error:
        raise GraphError(str(error).rstrip(".")) from error
    fake_quant.phase = "quantize"
    return fake_quant


def _numbers(value: Any, site: str) -> np.ndarray:
    try:
        scale = np.asarray(value, np.float32)
    except (ValueError, TypeError):
        scale = np.zeros(0, np.float32)
    if scale.ndim > 1 or not scale.size or not np.all(np.isfinite(scale) & (scale > 0)):
        raise GraphError(f"site {site} lacks a scale of positive numbers")
    return scale


def read_scheme(words: Any) -> QScheme:
    """Reads what `QScheme.describe` writes.

    Raises:
        GraphError: when the words describe no scheme; the message is a clause.
    """
    match = _WORDS.match(words) if isinstance(words, str) else None
    if match is None:
        raise GraphError(f"{ascii(words)[:60]} describes no scheme")
    unsigned, bits, kind, axis, narrow, pow2, rounding = match.groups()
    try:
        return QScheme(
            bits=int(bits),
            signed=not unsigned,
            symmetric=kind == "sym",
            narrow=bool(narrow),
            axis=None if axis is None else int(axis),
            power_of_two=bool(pow2),
            rounding=(rounding or "half_even").replace("-", "_"),  # type: ignore[arg-type]
        )
    except SchemeError as error:
        raise GraphError(str(error).rstrip(".")) from error


LookUp = Callable[[dict[str, Any]], Any]

_PATH = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*\Z")


@on_engine_thread
def to_traced(graph: MSCGraph, allow: Iterable[str] = ()) -> TracedModule:
    """Makes a traced module that computes what an MSCGraph describes.

    A document that qtrace has written gives the bits of the module that it was written from, with the same
    parameters at the same paths. The module is flat. It takes its inputs by position and returns one tensor,
    or a tuple: how arguments and results were nested is not part of a document. A converted module
    rounds by fake quants below ``qsites``; the record that `qtrace.convert` leaves is not part of a document.

    A document of another tool is taken as far as MegEngine has what its types and attributes say.

    Args:
        graph: the graph, with the values of its weights: of `from_msc`, for example.
        allow: names ``pkg.mod:Name`` of functions and module classes of your own that it may call.

    Returns:
        A traced module in eval mode.

    Raises:
        GraphError: naming the node that cannot be rebuilt, and why.
    """
    if not isinstance(graph, MSCGraph):
        raise GraphError(
            f"to_traced takes an MSCGraph, not a {type(graph).__name__}: read one with from_msc."
        )
    return _Rebuilder(graph, AllowList(allow)).module()


class _Rebuilder:
    """Builds the graph of one document."""

    def __init__(self, graph: MSCGraph, names: AllowList) -> None:
        self.graph, self.names = graph, names
        self.builder = GraphBuilder(re.sub(r"\W+", "_", graph.name) or "Net")
        self.tensors: dict[str, TensorNode] = {}
        self.stored: dict[str, TensorNode] = {}  # path -> the node that reads the parameter
        self.values: dict[str, np.ndarray] = {}  # path -> value
        self.modules: dict[str, Any] = {}  # path -> how the module there is described
        self.roundings = Roundings(graph, self.builder)

    def module(self) -> TracedModule:
        """Returns the traced module."""
        self._add_inputs()
        for node in self.graph.nodes:
            if node.optype == "input":
                continue
            try:
                self._add(node)
            except (RefusedError, DamagedError, QtraceError) as error:
                reason = str(error).rstrip(".")
                raise GraphError(f"node {node.name} ({node.optype}) cannot be rebuilt: {reason}.") from error
        outputs = []
        for position, tensor in enumerate(self.graph.get_outputs()):
            producer = self.graph.find_producer(tensor)
            value = self.tensors[tensor.name]
            outputs.append(self.roundings.apply(producer, f"graph_output_{position}", value))
        traced = self.builder.finish(outputs[0] if len(outputs) == 1 else tuple(outputs))
        self._record_open_axes(traced)
        return traced

    def _add_inputs(self) -> None:
        inputs = {node.name for node in self.graph.nodes if node.optype == "input"}
        for tensor in self.graph.get_inputs():
            node = self.graph.find_producer(tensor)
            if node.name not in inputs or node.outputs != (tensor,) or tensor.name in self.tensors:
                raise GraphError(
                    f"input {tensor.name} is given by node {node.name}, which is no input of its own."
                )
            try:
                shape, dtype = _traced_shape(node, tensor), read_dtype(tensor.dtype)
            except GraphError as error:
                raise GraphError(f"input {tensor.name}: {error}.") from error
            self.tensors[tensor.name] = self.builder.input(node.name, shape, dtype)
            inputs.discard(node.name)
        if inputs:
            raise GraphError(f"node {min(inputs)} is an input, and the graph does not list it.")

    def _add(self, node: MSCNode) -> None:
        if node.optype == "constant":
            results = [self._weight(node, "const", None)]
        else:
            results = self._results(node)
        if len(results) != len(node.outputs):
            raise GraphError(f"it has {len(results)} results, and the document {len(node.outputs)}")
        path = ".".join(part for part in node.scope[1:] if part.isidentifier() or part.isdecimal())
        for tensor, result in zip(node.outputs, results, strict=True):
            _compare(tensor, result)
            self.tensors[tensor.name] = result
            if node.optype != "constant" and result not in self._inputs_of(node):
                result._qualname = f"{self.builder.graph._name}.{path}{'.' if path else ''}[{node.name}]"

    def _inputs_of(self, node: MSCNode) -> list[TensorNode]:
        return [self.tensors[tensor.name] for tensor in node.inputs]

    def _results(self, node: MSCNode) -> list[TensorNode]:
        """Adds the calls of a node; returns their results."""
        described = _described_call(node)
        if described is not None:
            return self._call(node, described, lambda reference: self._operand(node, reference))
        calls = standard_calls(node)
        steps: dict[str, TensorNode] = {}

        def look_up(reference: Mapping[str, Any]) -> TensorNode:
            key = str(reference["ref"])
            return steps[key] if key in steps else self._operand(node, reference)

        results: list[TensorNode] = []
        for index, call in enumerate(calls.steps):
            results = self._call(node, call, look_up)
            steps.update((f"step_{index}_{i}", result) for i, result in enumerate(results))
            steps[f"step_{index}"] = results[0]
        return results if calls.results is None else [look_up(reference) for reference in calls.results]

    def _call(self, node: MSCNode, call: Mapping[str, Any], look_up: LookUp) -> list[TensorNode]:
        arguments, options = call.get("args", []), call.get("kwargs", {})
        if not isinstance(arguments, list) or not isinstance(options, dict):
            raise GraphError("its arguments are no list, or its options no object")
        try:
            args = [read_value(value, look_up) for value in arguments]
            kwargs = {key: read_value(value, look_up) for key, value in options.items()}
        except RecursionError as error:
            raise GraphError("its arguments are nested too deeply") from error
        add = self._callee(node, call, look_up, args)
        names = [node.name, *(f"{node.name}_{i}" for i in range(1, len(node.outputs)))]
        try:
            add(*args, name=names, **kwargs)
        except (TypeError, AssertionError, ValueError) as error:  # of MegEngine's lists of arguments
            raise GraphError(f"its arguments do not fit its callee ({str(error).splitlines()[0]})") from error
        return list(self.builder.graph._exprs[-1].outputs)

    def _callee(
        self, node: MSCNode, call: Mapping[str, Any], look_up: LookUp, args: list[Any]
    ) -> Callable[..., Any]:
        """Returns what adds the call to the graph."""
        if "function" in call:
            function = self.names.function(_pair(call["function"]))
            return functools.partial(self.builder.call_function, function)
        if "method" in call:
            method = call["method"]
            if not isinstance(method, str) or method not in allowlist.TENSOR_METHODS:
                raise GraphError(f"it calls the method {shown(method)}, which is not on the allow-list")
            if not args or not isinstance(args[0], TensorNode):
                raise GraphError(f"it calls the method {method} of no tensor")
            return functools.partial(self.builder.call_method, method)
        if "kernel" in call:
            if not all(isinstance(value, TensorNode) for value in args):
                raise GraphError("it applies a kernel to what is no tensor")
            return functools.partial(self.builder.call_kernel, _kernel(call, look_up))
        if "module" in call:
            return functools.partial(self.builder.call_module, self._module(node, call, look_up), None)
        raise GraphError("it calls no function, method, kernel or module")

    def _operand(self, node: MSCNode, reference: Mapping[str, Any]) -> TensorNode:
        """Returns what a call reads: an input of the node or a weight, rounded as the document says."""
        key, shape = reference.get("ref"), reference.get("shape")
        number = re.fullmatch(r"input_(\d{1,6})", key) if isinstance(key, str) else None
        if number is not None and int(number[1]) < len(node.inputs):
            value = self.tensors[node.inputs[int(number[1])].name]
            value = self.roundings.apply(node, f"input_{int(number[1])}", value)
            return value if shape is None else self.builder.call_function(F.reshape, value, _sizes(shape))
        if not isinstance(key, str) or key not in node.weights:
            raise GraphError(f"it reads {shown(key)}, which is none of its inputs and weights")
        return self._weight(node, key, shape)

    def _weight(self, node: MSCNode, kind: str, shape: Any) -> TensorNode:
        """Returns the node that reads a weight, which is stored at its path first."""
        value = self._value(node, kind, shape)
        place = stored_place(node, kind)
        if not _PATH.match(place.path) or any(part.startswith("__") for part in place.path.split(".")):
            raise GraphError(f"its {kind} is stored at {shown(place.path)}, which is no path")
        path, value = place.path, self.roundings.stored_value(node, kind, value)
        if path in self.stored:
            known = self.values[path]
            if known.dtype != value.dtype or not np.array_equal(
                known, value, equal_nan=value.dtype.kind == "f"
            ):
                raise GraphError(f"two values are stored at {path}")
        else:
            self.values[path] = value
            if place.kind == "constant":
                self.stored[path] = self.builder.constant(Tensor(value), name=node.weights[kind].name)
            else:
                self.stored[path] = self.builder.parameter(path, value, place.kind == "parameter")
        return self.roundings.apply(node, kind, self.stored[path])

    def _value(self, node: MSCNode, kind: str, shape: Any) -> np.ndarray:
        if kind not in node.weights:
            raise GraphError(f"it lacks weight {shown(kind)}")
        name = node.weights[kind].name
        if name not in self.graph.values:
            raise GraphError(f"its {kind} {name} lacks a value: read the document with its .npz file")
        value = self.graph.values[name]
        read_dtype(value.dtype.name)
        if shape is None:
            return value
        if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
            raise GraphError(f"it takes its {kind} in the shape {shown(shape)}")
        try:
            return value.reshape(shape)
        except ValueError:
            raise GraphError(
                f"its {kind} of shape {list(value.shape)} cannot have the shape {shape}"
            ) from None

    def _module(self, node: MSCNode, call: Mapping[str, Any], look_up: LookUp) -> str:
        """Adds the module of a call where it is called first; returns its path."""
        path, description = call.get("path"), {k: call.get(k) for k in ("module", "attributes", "tensors")}
        if not isinstance(path, str) or not _PATH.match(path):
            raise GraphError(f"its module has the path {shown(path)}, which is none")
        weights = {kind: tensor.name for kind, tensor in node.weights.items()}
        if path in self.modules:
            if self.modules[path] != (description, weights):
                raise GraphError(f"two modules have the path {path}")
            return path
        cls = self.names.module_type(_pair(call["module"]), instance=True)
        attributes, tensors = call.get("attributes"), call.get("tensors")
        if not isinstance(attributes, dict) or not isinstance(tensors, dict):
            raise GraphError("its module lacks attributes or tensors")
        module = cls.__new__(cls)
        Module.__init__(module)
        for name, value in attributes.items():
            if not name.isidentifier() or name.startswith("__") or name in BOOKKEEPING or hasattr(cls, name):
                raise GraphError(f"its module has the attribute {shown(name)}, which no file may set")
            setattr(module, name, read_value(value, look_up))
        for name, reference in tensors.items():
            if not name.isidentifier() or not isinstance(reference, dict) or hasattr(cls, name):
                raise GraphError(f"its module has the tensor {shown(name)}, which no file may set")
            kind = str(reference.get("ref"))
            value = self._value(node, kind, reference.get("shape"))
            trainable = stored_place(node, kind).kind == "parameter"
            setattr(module, name, Parameter(value) if trainable else Tensor(value))
        check_attributes(module, path)
        self.builder.add_module(path, module)
        self.modules[path] = (description, weights)
        return path

    def _record_open_axes(self, traced: TracedModule) -> None:
        axes = []
        for tensor in self.graph.get_inputs():
            name = self.tensors[tensor.name]._name
            for axis, size in enumerate(tensor.shape):
                if size == -1:
                    prim = tensor.prims[axis] if tensor.prims else f"{name}_{axis}"
                    axes.append(OpenAxis(name, axis, prim, prim))
        if axes:
            write_open_axes(traced, OpenAxes(tuple(axes)))


def _described_call(node: MSCNode) -> dict[str, Any] | None:
    """Returns the call of a node that its attribute ``call`` has; None without one."""
    text = node.attrs.get("call")
    if text is None and "no_call" in node.attrs:
        raise GraphError(f"the document does not say how it is called, because {node.attrs['no_call']}")
    call = None if text is None else _read_json(text, "call")
    if call is not None and call.get("node", node_digest(node)) != node_digest(node):
        raise GraphError(
            "its type, attributes, inputs or weights were edited, but not its attribute 'call': remove "
            "'call', or edit it and remove its key 'node'"
        )
    return call


def _sizes(shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, list) or not all(type(n) is int and n >= -1 for n in shape):
        raise GraphError(f"it takes an input in the shape {shown(shape)}")
    return tuple(shape)


def _pair(key: Any) -> tuple[str, str]:
    if not isinstance(key, str) or not ENTRY.match(key):
        raise GraphError(f"{shown(key)} is no name of the form pkg.mod:Name")
    module, _, name = key.partition(":")
    return module, name


def _kernel(call: Mapping[str, Any], look_up: LookUp) -> Any:
    key = f"megengine.core._imperative_rt.ops:{call['kernel']}"
    if key not in allowlist.OPDEFS:
        raise GraphError(f"it applies the kernel {shown(call['kernel'])}, which is not on the allow-list")
    state = read_value(call.get("state"), look_up)
    if not isinstance(state, dict):
        raise GraphError("its kernel lacks a state")
    cls = getattr(kernels, call["kernel"])
    return make_op(cls, op_state(cls, state))


def _traced_shape(node: MSCNode, tensor: MSCTensor) -> tuple[int, ...]:
    """Returns the shape that an input was traced with, which its open axes do not say."""
    if -1 not in tensor.shape:
        return tensor.shape
    text = node.attrs.get("traced_shape", "")
    sizes = tuple(int(part) if re.fullmatch(r"\d{1,18}", part) else -1 for part in text.split(","))
    known = zip(sizes, tensor.shape, strict=False)
    if len(sizes) != tensor.ndim or -1 in sizes or any(n not in (size, -1) for size, n in known):
        raise GraphError(f"its shape {list(tensor.shape)} is open, and traced_shape is {text!r}: give sizes")
    return sizes


def _compare(tensor: MSCTensor, result: TensorNode) -> None:
    """Refuses a result that is not what the document says."""
    shape = tuple(int(n) for n in result.shape)
    fits = len(shape) == tensor.ndim and all(a in (b, -1) for a, b in zip(tensor.shape, shape, strict=True))
    dtype = np.dtype(result.dtype).name
    if not fits or dtype != read_dtype(tensor.dtype).name:
        raise GraphError(
            f"it gives {list(shape)} {dtype}, and the document says {list(tensor.shape)} {tensor.dtype}"
        )


def _read_json(text: str, about: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GraphError(f"its {about} is no JSON ({type(error).__name__})") from error
    if not isinstance(value, dict):
        raise GraphError(f"its {about} is no object")
    return value

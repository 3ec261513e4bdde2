"""A fragment of an ONNX file: a model of a few nodes, which onnxruntime runs as they are in the file.

onnxruntime ends the process at a division of integers by 0 or with an overflow: these are found before.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qtrace.errors import ExportError
from qtrace.onnxfile.external_data import onnx
from qtrace.onnxfile.local_session import LocalSession, SessionError, SessionSettings, dtype_of
from qtrace.onnxfile.model import MAX_DEPTH, RANDOM_OPS, limit_loops, limit_reached, own_operators

# One thread: the last bits of onnxruntime's results depend on their number.
_SETTINGS = SessionSettings(optimize=False, threads=1, spin=False)
SMALL = 4096
"""Elements: larger initializers hold weights, not sizes."""

Shape = tuple[int, ...]
_Key = tuple[tuple[Shape, ...], tuple[tuple[str, tuple[int, ...]], ...]]

_OPS = ("Div", "Mod")


@dataclass(frozen=True)
class FragmentTensor:
    """An input or output of a fragment.

    Attributes:
        name: its name.
        kind: the type as onnxruntime spells it, such as ``tensor(float)`` or ``seq(tensor(int64))``.
        shape: the sizes, None for one that depends on values; None if the number of axes does, too.
    """

    name: str
    kind: str
    shape: tuple[int | None, ...] | None

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """The numpy dtype; None for what is no tensor of numbers that numpy has."""
        return dtype_of(self.kind)

    @property
    def fixed_shape(self) -> Shape | None:
        """The shape if it is the same for all values."""
        if self.shape is None or None in self.shape:
            return None
        return tuple(int(n) for n in self.shape if n is not None)

    @property
    def has_values(self) -> bool:
        """Whether it is a tensor of fixed shape that is not empty, as MegEngine needs them."""
        return self.fixed_shape is not None and 0 not in self.fixed_shape


class Fragment:
    """A fragment that is run; sessions are opened when they are first needed, and kept.

    Args:
        model: a serialized model, whose inputs and outputs are tensors.
    """

    def __init__(self, model: bytes) -> None:

        self._bytes = model
        self._model = onnx.ModelProto.FromString(model)
        self._session: LocalSession | None = None
        self._inferred: dict[_Key, tuple[FragmentTensor, ...]] = {}

    @property
    def model(self) -> Any:
        """The model, which must not be changed."""
        return self._model

    @property
    def input_dtypes(self) -> list[np.dtype[Any]]:
        """The dtype of each input."""
        return [
            np.dtype(onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))
            for value in self._model.graph.input
        ]

    def run(self, values: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Computes the outputs.

        Args:
            values: one array an input, in its dtype.

        Raises:
            ExportError: when onnxruntime is not installed, refuses the nodes or the values, or would not
                survive a division by 0.
        """
        if self._session is None:
            data = self._bytes
            if "Loop" in own_operators(self._model.graph):
                limited = type(self._model).FromString(data)
                limit_loops(limited.graph)
                data = limited.SerializeToString()
            self._session = LocalSession(data, _SETTINGS, operators_of(self._model))
        names = [value.name for value in self._model.graph.input]
        feeds = dict(zip(names, values, strict=True))
        if fault := describe_division_fault(self._model, feeds):
            raise ExportError(f"{fault}, at which onnxruntime ends the process: give other data.")
        try:
            return self._session.run(None, feeds)
        except SessionError as error:
            if reason := limit_reached(error):
                raise ExportError(f"{reason} with these values: give others, or write it shorter.") from error
            raise

    @property
    def divides_by_inputs(self) -> bool:
        """Whether it divides by integers that are inputs, of which `run` refuses 0."""
        return divides_by_inputs(self._model)

    @property
    def draws_numbers(self) -> bool:
        """Whether it draws random numbers, which are others in each run."""
        return not RANDOM_OPS.isdisjoint(own_operators(self._model.graph))

    def infer(
        self, shapes: Sequence[Shape], values: Mapping[int, np.ndarray] | None = None
    ) -> tuple[FragmentTensor, ...]:
        """Returns type and shape of each output for inputs of these shapes.

        Args:
            shapes: the shape of each input.
            values: place of an input -> its values, where these are known: sizes that the nodes read.

        Raises:
            ExportError: when onnxruntime is not installed, or refuses the nodes for these shapes.
        """
        known, key = self._known(values), self._key(shapes, values)
        if key not in self._inferred:
            self._inferred[key] = infer_outputs(self._model, key[0], known)
        return self._inferred[key]

    def learn(
        self,
        shapes: Sequence[Shape],
        outputs: Sequence[FragmentTensor],
        values: Mapping[int, np.ndarray] | None = None,
    ) -> None:
        """Sets what `infer` returns for inputs of these shapes.

        Args:
            shapes: the shapes.
            outputs: type and shape of each output; the names are the model's.
            values: the known values of inputs, see `infer`.
        """
        names = [value.name for value in self._model.graph.output]
        named = zip(names, outputs, strict=True)
        kinds = tuple(FragmentTensor(name, own.kind, own.shape) for name, own in named)
        self._inferred[self._key(shapes, values)] = kinds

    def _known(self, values: Mapping[int, np.ndarray] | None) -> dict[str, np.ndarray]:
        """Returns the known values by the name of the input, in its dtype: only small integers."""
        inputs = [value.name for value in self._model.graph.input]
        dtypes = self.input_dtypes
        return {
            inputs[place]: np.asarray(array).astype(dtypes[place])
            for place, array in sorted((values or {}).items())
            if dtypes[place].kind in "iu" and np.size(array) <= SMALL
        }

    def _key(self, shapes: Sequence[Shape], values: Mapping[int, np.ndarray] | None) -> _Key:
        known = self._known(values).items()
        return (
            tuple(tuple(int(n) for n in shape) for shape in shapes),
            tuple((name, tuple(array.reshape(-1).tolist())) for name, array in known),
        )


def infer_outputs(
    model: Any,
    shapes: Sequence[Sequence[int | None] | None],
    known: Mapping[str, np.ndarray] | None = None,
) -> tuple[FragmentTensor, ...]:
    """Infers type and shape of the outputs of a model, by the rules of ONNX and of onnxruntime.

    A size counts as known only if it is the same for all values of the inputs.

    Args:
        model: a model; large initializers count only by their shapes.
        shapes: the shape of each input that is a tensor.
        known: input -> its values, where these are known.

    Raises:
        ExportError: when onnxruntime is not installed, or cannot run the nodes.
    """
    light = _without_weights(model, shapes, known or {})
    session = LocalSession(light.SerializeToString(), _SETTINGS, operators_of(model))
    count = len(model.graph.output)
    outputs = [
        FragmentTensor(value.name, value.type, tuple(n if isinstance(n, int) else None for n in value.shape))
        for value in session.outputs[:count]
    ]
    inferred = {**_inferred_by_onnx(light), **_shaped_like_inputs(light)}
    ranks = _ranks(light, [value for value in outputs if not value.shape and value.name not in inferred])
    results = []
    for value in outputs:
        shape: tuple[int | None, ...] | None = value.shape
        if not value.kind.startswith("tensor("):
            shape = None
        elif value.name in inferred:
            own = inferred[value.name]
            shape = own if not value.shape else _merged(own, value.shape)
        elif not value.shape and ranks.get(value.name) != 0:
            shape = None
        results.append(FragmentTensor(value.name, value.kind, shape))
    return tuple(results)


def _merged(first: Sequence[int | None], second: Sequence[int | None]) -> tuple[int | None, ...]:
    if len(first) != len(second):
        return tuple(second)
    return tuple(a if a is not None else b for a, b in zip(first, second, strict=True))


def _inferred_by_onnx(model: Any) -> dict[str, tuple[int | None, ...]]:
    """Returns output -> shape for the outputs whose number of axes ONNX's own rules know."""
    try:
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    except (onnx.shape_inference.InferenceError, RuntimeError, ValueError):
        return {}
    return {
        value.name: _sizes(value.type.tensor_type)
        for value in inferred.graph.output
        if value.type.HasField("tensor_type") and value.type.tensor_type.HasField("shape")
    }


def _sizes(tensor: Any) -> tuple[int | None, ...]:
    return tuple(d.dim_value if d.HasField("dim_value") else None for d in tensor.shape.dim)


# Ops of ai.onnx.ml whose result has the shape of their input, of which ONNX's rules say nothing.
_ELEMENTWISE_ML = ("Binarizer", "Imputer", "Normalizer", "Scaler")


def _shaped_like_inputs(model: Any) -> dict[str, tuple[int | None, ...]]:
    """Returns output -> shape where the only node of a model gives the shape of its input."""
    if len(model.graph.node) != 1:
        return {}
    (node,) = model.graph.node
    if node.domain != "ai.onnx.ml" or node.op_type not in _ELEMENTWISE_ML:
        return {}
    types = {value.name: value.type.tensor_type for value in model.graph.input}
    kind = types.get(node.input[0])
    if kind is None or not kind.HasField("shape"):
        return {}
    return {node.output[0]: _sizes(kind)}


def _ranks(model: Any, outputs: Sequence[FragmentTensor]) -> dict[str, int]:
    """Returns the number of axes of outputs for which onnxruntime shows none, where it knows the number.

    It shows an unknown number as it shows no axes; the shape of the tensor has one size for each axis.
    """
    tensors = [value for value in outputs if value.kind.startswith("tensor(")]
    if not tensors:
        return {}

    longer = onnx.ModelProto()
    longer.CopyFrom(model)
    if not any(entry.domain in ("", "ai.onnx") for entry in longer.opset_import):
        longer.opset_import.append(onnx.helper.make_opsetid("", 17))
    for value in tensors:
        name = f"{value.name}__shape"
        longer.graph.node.append(onnx.helper.make_node("Shape", [value.name], [name]))
        longer.graph.output.append(onnx.ValueInfoProto(name=name))
    try:
        session = LocalSession(longer.SerializeToString(), _SETTINGS, operators_of(model))
    except SessionError:
        return {}
    ranks = {}
    for tensor, shape in zip(tensors, session.outputs[len(model.graph.output) :], strict=True):
        if len(shape.shape) == 1 and isinstance(shape.shape[0], int):
            ranks[tensor.name] = shape.shape[0]
    return ranks


def _without_weights(
    model: Any, shapes: Sequence[Sequence[int | None] | None], known: Mapping[str, np.ndarray]
) -> Any:
    """Copies a model with inputs of these shapes, and with inputs in place of large initializers.

    Inputs whose values are known become initializers.
    """
    light = onnx.ModelProto(ir_version=model.ir_version)
    light.opset_import.extend(model.opset_import)
    light.functions.extend(model.functions)
    graph = light.graph
    graph.name = model.graph.name or "fragment"
    graph.node.extend(model.graph.node)
    graph.output.extend(onnx.ValueInfoProto(name=value.name) for value in model.graph.output)
    for source, shape in zip(model.graph.input, shapes, strict=True):
        if source.name in known:
            graph.initializer.append(onnx.numpy_helper.from_array(known[source.name], source.name))
            continue
        graph.input.append(source)
        if source.type.HasField("tensor_type"):
            _set_shape(graph.input[-1].type.tensor_type, shape)
    for tensor in model.graph.initializer:
        if int(np.prod(tensor.dims, dtype=np.int64)) <= SMALL:
            graph.initializer.append(tensor)
        else:
            graph.input.append(
                onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
            )
    return light


def _set_shape(tensor: Any, shape: Sequence[int | None] | None) -> None:
    tensor.ClearField("shape")
    if shape is not None:
        tensor.shape.SetInParent()
        for size in shape:
            axis = tensor.shape.dim.add()
            if size is not None:
                axis.dim_value = size


def operators_of(model: Any) -> str:
    """Returns the kinds of the nodes of a model, such as ``LSTM`` or ``com.microsoft.Gelu``, for messages."""
    kinds = dict.fromkeys(
        f"{node.domain}.{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type
        for node in model.graph.node
    )
    shown = list(kinds)[:3]
    return ", ".join(shown) + (f" and {len(kinds) - 3} more" if len(kinds) > 3 else "")


def check_fragment(model: bytes) -> str:
    """Returns what is wrong with the bytes of a fragment, as a clause; "" if they are a whole valid model."""
    if importlib.util.find_spec("onnx") is None:
        return "needs the package onnx"
    from google.protobuf.message import DecodeError

    if len(model) > onnx.checker.MAXIMUM_PROTOBUF:
        return "is too large"
    try:
        proto = onnx.ModelProto.FromString(model)
    except (DecodeError, ValueError, RecursionError):
        return "is no ONNX model"
    if not proto.graph.node or not proto.graph.output:
        return "is an ONNX model without nodes or outputs"
    if proto.functions:  # no import writes any: ops that they define are written as their nodes
        return "defines functions"
    if _has_external(proto.graph, 0):
        return "reads tensors of another file"
    try:
        onnx.checker.check_model(proto)
    except (onnx.checker.ValidationError, ValueError, RuntimeError) as error:
        return f"is no valid ONNX model ({(str(error).strip().splitlines() or ['no reason'])[0][:200]})"
    return ""


def _has_external(graph: Any, depth: int) -> bool:
    if depth > MAX_DEPTH:
        return True
    tensors = [*graph.initializer, *(t for s in graph.sparse_initializer for t in (s.values, s.indices))]
    for node in graph.node:
        for attribute in node.attribute:
            tensors += [attribute.t, *attribute.tensors]
            bodies = [attribute.g] if attribute.HasField("g") else []
            if any(_has_external(body, depth + 1) for body in (*bodies, *attribute.graphs)):
                return True
    return any(
        tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.external_data for tensor in tensors
    )


def _divisions(model: Any) -> list[tuple[str, str, str]]:
    """Returns the op, dividend and divisor of each division."""
    own = (node for node in model.graph.node if node.domain in ("", "ai.onnx") and node.op_type in _OPS)
    return [(node.op_type, node.input[0], node.input[1]) for node in own]


def divides_by_inputs(model: Any) -> bool:
    """Returns whether a model divides by integers that are inputs of it."""
    kinds = {i.name: i.type.tensor_type.elem_type for i in model.graph.input}
    divisors = [kinds[divisor] for _, _, divisor in _divisions(model) if divisor in kinds]
    return any(np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind)).kind in "iu" for kind in divisors)


def describe_division_fault(model: Any, feeds: Mapping[str, np.ndarray]) -> str:
    """Returns why onnxruntime would not survive a division, as a sentence's end; "" if it does.

    Args:
        model: the model; divisors that it computes itself are not looked at.
        feeds: input -> its value.
    """
    divisions = _divisions(model)
    if not divisions:
        return ""
    stored = {t.name: t for t in model.graph.initializer}

    def value(name: str) -> np.ndarray | None:
        if name in feeds:
            return feeds[name]
        return np.asarray(onnx.numpy_helper.to_array(stored[name])) if name in stored else None

    for op, dividend, divisor in divisions:
        numbers = value(divisor)
        if numbers is None or numbers.dtype.kind not in "iu":
            continue
        if not numbers.all():
            return f"{op} divides integers by 0"
        over = value(dividend)
        if numbers.dtype.kind == "i" and over is not None and (numbers == -1).any():
            lowest = np.iinfo(numbers.dtype).min
            if (over == lowest).any():
                return f"{op} divides {lowest} by -1, which exceeds {numbers.dtype}"
    return ""

"""Writes ops of a finished ONNX model in float16, with Casts where float32 begins.

The exporter marks the nodes of each op that is to be in float16. A tensor keeps its name in float32, if that
is read. Scales of QuantizeLinear and DequantizeLinear stay float32: in float16 they make other integers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper, shape_inference

from qtrace.export.float_types import FLOAT16_KEY
from qtrace.onnxfile import external_data
from qtrace.onnxfile.model import OnnxEditor, read_names, rename_tensors
from qtrace.preparation.float16 import loses

__all__ = ["write_float16"]

_FLOAT, _HALF = TensorProto.FLOAT, TensorProto.FLOAT16
_LARGEST = float(np.finfo(np.float16).max)

_BOUNDS = ("Clip", "Max", "Min")
_SCALED = ("Conv", "ConvTranspose", "Gemm", "MatMul", "Mul", "Div", "PRelu")
_ONE_TYPE = (
    "Add Sub Neg Abs Relu LeakyRelu Sigmoid Tanh HardSigmoid HardSwish Erf Softmax Concat Reshape Transpose "
    "Squeeze Unsqueeze Flatten Slice Split Gather GatherND Expand Tile Pad Where DepthToSpace SpaceToDepth "
    "Resize MaxPool AveragePool GlobalAveragePool GlobalMaxPool Identity Shape"
)
_TYPES = frozenset((*_ONE_TYPE.split(), *_BOUNDS, *_SCALED))
_IN_FLOAT32 = {("Resize", 1), ("Resize", 2)}
"""Inputs that ONNX has in float32 whatever the type of the values."""


def write_float16(model: Any, marked: Mapping[str, str], kinds: Mapping[str, Any]) -> list[str]:
    """Writes nodes of a model in float16, and lists their ops in its metadata.

    An op stays float32 if a node of it lacks a float16 form, or float16 cannot hold one of its numbers.

    Args:
        model: an ONNX model with its tensors; it is changed in place.
        marked: first result of a node -> the op of the graph that it is of.
        kinds: tensor -> its numpy type, where the graph knows it.

    Returns:
        The ops in float16, by the names of their first outputs.
    """
    groups: dict[str, list[NodeProto]] = defaultdict(list)
    for node in model.graph.node:
        if node.output[0] in marked:
            groups[marked[node.output[0]]].append(node)
    if not groups:
        return []
    writer = _Writer(model, _types(model, kinds))
    chosen = {op: nodes for op, nodes in groups.items() if writer.fits(nodes)}
    names = [op for op, nodes in chosen.items() if any(writer.has_floats(node) for node in nodes)]
    writer.convert([node for nodes in chosen.values() for node in nodes])
    model.metadata_props.add(key=FLOAT16_KEY, value="\n".join(names))
    return names


def _types(model: Any, kinds: Mapping[str, Any]) -> dict[str, int]:
    """Returns tensor -> its ONNX type."""
    copy = external_data.skeleton(model)
    known = {info.name for info in (*copy.graph.input, *copy.graph.output, *copy.graph.value_info)}
    for name, kind in kinds.items():
        if name not in known:
            copy.graph.value_info.append(helper.make_tensor_value_info(name, kind, None))
    inferred = shape_inference.infer_shapes(copy).graph
    infos = (*inferred.input, *inferred.output, *inferred.value_info)
    types = {info.name: info.type.tensor_type.elem_type for info in infos}
    return {**types, **{tensor.name: tensor.data_type for tensor in model.graph.initializer}}


class _Writer(OnnxEditor):
    """Converts nodes of a model.

    Args:
        model: the model; it is changed in place.
        types: tensor -> its ONNX type.
    """

    def __init__(self, model: Any, types: Mapping[str, int]) -> None:
        super().__init__(model)
        self.stored = {tensor.name: tensor for tensor in self.graph.initializer}  # without Constant nodes
        self.types = types
        self.halves: dict[str, str] = {}  # a float32 tensor -> the same in float16

    def has_floats(self, node: NodeProto) -> bool:
        """Whether a node gives floats."""
        return any(self.types.get(name) in (_FLOAT, _HALF) for name in node.output)

    def fits(self, nodes: Iterable[NodeProto]) -> bool:
        """Whether all nodes of an op have a form in float16, and all numbers a value."""
        for node in nodes:
            if any(self.types.get(name, 0) == 0 for name in (*node.input, *node.output) if name):
                return False
            places = self._read(node)
            if not places and not self.has_floats(node):
                continue  # of sizes
            if node.op_type not in _TYPES or node.domain:
                return False
            if not all(self._holds(node, place) for place in places if node.input[place] in self.stored):
                return False
        return True

    def _read(self, node: NodeProto) -> list[int]:
        """Returns the places of the inputs that become float16."""
        floats = [i for i, name in enumerate(node.input) if self.types.get(name) == _FLOAT]
        return [i for i in floats if (node.op_type, i) not in _IN_FLOAT32]

    def _holds(self, node: NodeProto, place: int) -> bool:
        """Whether float16 holds a stored number well enough for what the node computes with it."""
        if node.op_type in _BOUNDS:
            return True  # what lies beyond float16 bounds nothing
        values = self._value(node.input[place])
        if np.abs(values).max(initial=0.0) > _LARGEST or np.isnan(values).any():
            return False
        is_bias = node.op_type in ("Conv", "ConvTranspose", "Gemm") and place == 2
        return node.op_type not in _SCALED or is_bias or not loses(values)

    def _value(self, name: str) -> np.ndarray:
        return numpy_helper.to_array(self.stored[name])

    def convert(self, nodes: list[NodeProto]) -> None:
        """Writes nodes in float16, and Casts around them."""
        chosen = {id(node) for node in nodes}
        wide = {name for node in self.nodes() if id(node) not in chosen for name in read_names(node)}
        wide |= self.output_names
        wide.update(
            node.input[i]
            for node in nodes
            for o, i in _IN_FLOAT32
            if o == node.op_type and i < len(node.input)
        )
        order: list[NodeProto] = []
        for node in self.nodes():
            if id(node) not in chosen:
                order.append(node)
                continue
            for place in self._read(node):
                node.input[place] = self._half(node.input[place], wide, order)
            order.append(node)
            for place, name in enumerate(node.output):
                if self.types.get(name) == _FLOAT:
                    node.output[place] = self._result(name, wide, order)
        self.set_nodes(_without_detours(order, self._all_halves(), self.output_names))
        self.drop_unread()
        self.finish()

    def _all_halves(self) -> set[str]:
        return {*self.halves.values(), *(name for name, kind in self.types.items() if kind == _HALF)}

    def _half(self, name: str, wide: set[str], order: list[NodeProto]) -> str:
        """Returns a float32 tensor in float16; it is stored or cast when it is first read so."""
        if name not in self.halves:
            if name in self.stored:
                self.halves[name] = self._store(name, wide)
            else:
                self.halves[name] = self.fresh(f"{name}_float16")
                order.append(_cast(name, self.halves[name], _HALF))
        return self.halves[name]

    def _store(self, name: str, wide: set[str]) -> str:
        """Stores a tensor in float16, under its own name if nobody reads it in float32."""
        values = np.clip(self._value(name), -_LARGEST, _LARGEST).astype(np.float16)
        if name in wide:
            return self.store(f"{name}_float16", values)
        self.stored[name].CopyFrom(numpy_helper.from_array(values, name))
        return name

    def _result(self, name: str, wide: set[str], order: list[NodeProto]) -> str:
        """Returns the name of a result in float16; where float32 is read, a Cast gives it its old name."""
        if name not in wide:
            self.halves[name] = name
            return name
        self.halves[name] = self.fresh(f"{name}_float16")
        order.append(_cast(self.halves[name], name, _FLOAT))
        return self.halves[name]


def _cast(source: str, result: str, kind: int) -> NodeProto:
    return helper.make_node("Cast", [source], [result], name=f"{result}_Cast", to=kind)


def _is_cast(node: NodeProto, kind: int) -> bool:
    return node.op_type == "Cast" and any(a.name == "to" and a.i == kind for a in node.attribute)


def _without_detours(nodes: list[NodeProto], halves: Container[str], outputs: set[str]) -> list[NodeProto]:
    """Leaves out Casts to float16 after Casts from it, as at the ends of a file that was in float16."""
    casts = (node for node in nodes if _is_cast(node, _FLOAT))
    sources = {node.output[0]: node.input[0] for node in casts if node.input[0] in halves}
    computed = {name for node in nodes for name in node.output}
    kept, same, ends = list[NodeProto](), dict[str, str](), dict[str, str]()
    for node in nodes:
        if same:
            rename_tensors(node, same)
        if _is_cast(node, _HALF) and node.input[0] in sources:
            node.input[0] = sources[node.input[0]]
            if node.output[0] not in outputs:
                same[node.output[0]] = node.input[0]
                continue
            if node.input[0] in computed and node.input[0] not in ends:
                ends[node.input[0]] = node.output[0]
                continue
            node = helper.make_node("Identity", [node.input[0]], [node.output[0]], name=node.name)
        kept.append(node)
    for node in kept if ends else ():
        rename_tensors(node, ends)
    return kept

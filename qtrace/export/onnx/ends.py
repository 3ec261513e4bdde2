"""The ends of an ONNX file: names that the user chose, sizes, preprocessing, and the choice of boxes.

Preprocessing and the choice of a detector's boxes, by NonMaxSuppression, are nodes of the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from qtrace.errors import ExportError
from qtrace.export.detections import NMS, Heads, Suppression, find_heads
from qtrace.export.onnx.writer import OnnxWriter
from qtrace.graph.interface import Interface, TensorInfo
from qtrace.graph.opaque import OpaqueOp
from qtrace.graph.types import TensorNode
from qtrace.graph.walk import output_index, owner

PREPROCESS = "qtrace.preprocess"
"""The metadata property of files with preprocessing: the name of the tensor that it computes."""

_PREFIX = "qtrace_preprocess"

# The outputs: type, and the sizes after the number of boxes.
_OUTPUTS: dict[str, tuple[int, tuple[int, ...]]] = {
    "detection_boxes": (TensorProto.FLOAT, (4,)),
    "detection_scores": (TensorProto.FLOAT, ()),
    "detection_classes": (TensorProto.INT64, ()),
    "detection_images": (TensorProto.INT64, ()),
}


def choose_names(
    interface: Interface | None,
    inputs: Sequence[tuple[TensorNode, str]],
    outputs: Sequence[tuple[TensorNode, str]],
    names: tuple[Iterable[str] | None, Iterable[str] | None],
) -> Interface | None:
    """Returns the interface of a file with the names that the user chose.

    Args:
        interface: the interface of the graph; None for the names and types of the nodes.
        inputs: the inputs of the graph, each with its name in the file.
        outputs: the outputs of the graph, each with its name in the file.
        names: the chosen names of all inputs and of all outputs, in order; None for those that there are.

    Raises:
        ExportError: for another number of names, or names that are no text or not unique.
    """
    if names == (None, None):
        return interface
    sides = []
    stored = (None, None) if interface is None else (interface.inputs, interface.outputs)
    for option, ends, known, chosen in zip(
        ("input_names", "output_names"), (inputs, outputs), stored, names, strict=True
    ):
        tensors = known or tuple(TensorInfo(name, np.dtype(node.dtype).name) for node, name in ends)
        if chosen is not None:
            tensors = _renamed(option, tensors, [chosen] if isinstance(chosen, str) else list(chosen))
        sides.append(tensors)
    return Interface(sides[0], sides[1])


def _renamed(option: str, tensors: Sequence[TensorInfo], names: Sequence[Any]) -> tuple[TensorInfo, ...]:
    have = ", ".join(tensor.name for tensor in tensors)
    if len(names) != len(tensors):
        raise ExportError(
            f"{option} has {len(names)} names for {len(tensors)} tensors: give one for each of {have}, in "
            "order."
        )
    if wrong := [name for name in names if not isinstance(name, str) or not name]:
        raise ExportError(f"{option} names tensors by text, not by {wrong[0]!r}: give their names.")
    if len(set(names)) < len(names):
        raise ExportError(f"{option} gives two tensors one name: {', '.join(names)}.")
    return tuple(TensorInfo(name, t.dtype) for name, t in zip(names, tensors, strict=True))


def add_preprocessing(
    writer: OnnxWriter, inputs: list[ValueInfoProto], preprocess: Any, channels_first: tuple[int, ...]
) -> str:
    """Makes the one input of a model uint8 pixels (N, H, W, C), which the file itself normalizes.

    The nodes compute ``pixel * (scale / std) - mean / std`` and move the channels to the front. Resizing and
    the order of channels stay the caller's: the document string of the input says which.

    Args:
        writer: the writer of the model, which is complete.
        inputs: the inputs of the model; the first one is changed.
        preprocess: the `Preprocess` of the recipe; None if there is none.
        channels_first: the shape of the input, (N, C, H, W).

    Returns:
        The name of the tensor that the nodes compute.

    Raises:
        ExportError: when the recipe lacks preprocessing, or the model another input than one image.
    """
    if preprocess is None:
        raise ExportError(
            "preprocess=true needs means and scale: add preprocess: {size, mean, std} to the recipe, and "
            "prepare the module with it."
        )
    if len(inputs) != 1 or tuple(channels_first[1:]) != tuple(preprocess.size):
        shapes = "x".join(map(str, channels_first))
        raise ExportError(
            f"preprocess=true needs a model with one image as its input: the recipe says "
            f"{list(preprocess.size)}, and the model has {len(inputs)} inputs, the first of shape {shapes}."
        )
    info, channels = inputs[0], preprocess.size[0]
    inner = f"{info.name}_normalized"
    writer.rename({info.name: inner})
    std = np.broadcast_to(np.asarray(preprocess.std, np.float64), channels)
    factor = (preprocess.scale / std).astype(np.float32)
    offset = (-np.broadcast_to(np.asarray(preprocess.mean, np.float64), channels) / std).astype(np.float32)
    names = [f"{_PREFIX}_{part}" for part in ("float", "scaled", "shifted")]
    factors = [writer.constant(f"{_PREFIX}_{n}", v) for n, v in (("factor", factor), ("offset", offset))]
    nodes = [
        _node("Cast", [info.name], names[0], to=TensorProto.FLOAT),
        _node("Mul", [names[0], factors[0]], names[1]),
        _node("Add", [names[1], factors[1]], names[2]),
        _node("Transpose", [names[2]], inner, perm=[0, 3, 1, 2]),
    ]
    writer.nodes[:0] = nodes
    tensor = info.type.tensor_type
    dims = list(tensor.shape.dim)
    order = [dims[0], dims[2], dims[3], dims[1]]
    shape = [d.dim_param or d.dim_value for d in order]
    inputs[0] = helper.make_tensor_value_info(
        info.name,
        TensorProto.UINT8,
        shape,
        doc_string=f"pixels 0 to 255, N x H x W x C, channels {preprocess.channels}, resized before",
    )
    return inner


def _node(op: str, inputs: list[str], output: str, **attributes: Any) -> NodeProto:
    return helper.make_node(op, inputs, [output], name=f"{_PREFIX}/{op}", **attributes)


def without_preprocessing(model: ModelProto) -> bool:
    """Removes the preprocessing of a file, so that its input is what the graph reads.

    Returns:
        Whether there was any.
    """
    facts = {fact.key: fact.value for fact in model.metadata_props}
    inner = facts.get(PREPROCESS, "")
    own = [node for node in model.graph.node if node.name.startswith(f"{_PREFIX}/")]
    if not inner or len(model.graph.input) != 1 or not any(inner in node.output for node in own):
        return False
    for node in own:
        model.graph.node.remove(node)
    dims = list(model.graph.input[0].type.tensor_type.shape.dim)
    shape = [d.dim_param or d.dim_value for d in (dims[0], dims[3], dims[1], dims[2])]
    del model.graph.input[:]
    model.graph.input.append(helper.make_tensor_value_info(inner, TensorProto.FLOAT, shape))
    return True


def declare(
    node: TensorNode,
    name: str,
    axes: Mapping[int, str | None],
    fixed: Sequence[int | None] | None = None,
) -> Any:
    """Declares a tensor.

    Args:
        node: the node that carries it.
        name: its name.
        axes: the open axes, each with the name of its size; None for one of its own.
        fixed: the sizes that the imported file fixes, if the values decide the shape: the graph lacks them.
    """
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(node.dtype))
    dims: list[Any]
    if node.shape is None:  # the values decide it
        rank = _rank_of_opaque(node)
        if rank is None:
            return helper.make_tensor_value_info(name, kind, None)
        known = fixed if fixed is not None and len(fixed) == rank else [None] * rank
        dims = [size or f"{name}_{axis}" for axis, size in enumerate(known)]
        return helper.make_tensor_value_info(name, kind, dims)
    dims = [int(n) for n in node.shape]
    for axis, size in axes.items():
        dims[axis] = size or f"{name}_{axis}"
    return helper.make_tensor_value_info(name, kind, dims)


def _rank_of_opaque(node: TensorNode) -> int | None:
    """Returns the number of axes of a result of an opaque node; None if the values decide it."""
    op = owner(node.expr)
    assert isinstance(op, OpaqueOp)
    tensor = op.fragment.model.graph.output[output_index(node)].type.tensor_type
    return len(tensor.shape.dim) if tensor.HasField("shape") else None


def add_detections(
    writer: OnnxWriter, outputs: list[ValueInfoProto], shapes: Sequence[Sequence[int]], choice: Suppression
) -> None:
    """Adds the outputs ``detection_boxes``, ``_scores``, ``_classes`` and ``_images`` to a model.

    A row is a box that is kept: its corners (x1, y1, x2, y2), its score, its class, and its image in the
    batch. The rows of an image follow each other by score. The other outputs stay.

    Args:
        writer: the writer of the model, which is complete.
        outputs: the outputs of the model; the outputs of the boxes are appended.
        shapes: the shape of each output.
        choice: how boxes are chosen.

    Raises:
        ExportError: for an unknown output, or one of another shape or type.
    """
    names = [info.name for info in outputs]
    heads = find_heads(choice, list(zip(names, shapes, strict=True)))
    for place in heads.outputs:
        if outputs[place].type.tensor_type.elem_type != TensorProto.FLOAT:
            raise ExportError(f"nms needs float outputs, and {names[place]} is none: name another output.")
    if taken := [name for name in _OUTPUTS if name in names]:
        raise ExportError(f"nms adds the output {taken[0]}, which is there: rename it by output_names.")
    _Nodes(writer, names).run(heads, choice)
    for name, (kind, sizes) in _OUTPUTS.items():
        outputs.append(helper.make_tensor_value_info(name, kind, ["detections", *sizes]))


class _Nodes:
    """Writes the nodes; the names of their results begin alike, by which they are taken off again."""

    def __init__(self, writer: OnnxWriter, outputs: Sequence[str]) -> None:
        self.writer, self.outputs = writer, outputs

    def run(self, heads: Heads, choice: Suppression) -> None:
        """Writes all nodes."""
        boxes, scores = self.outputs[heads.boxes], self.outputs[heads.scores]
        if heads.columns > 4:
            boxes = self.columns(boxes, 0, 4, "raw")
            scores = self.columns(scores, heads.first, heads.first + heads.classes, "classes")
        corners = self.corners(boxes) if choice.form == "cxcywh" else boxes
        if heads.objectness is not None:
            factor = self.outputs[heads.objectness]
            if heads.columns > 4:
                factor = self.columns(factor, heads.factor, heads.factor + 1, "objectness")
            scores = self.node("Mul", [scores, factor], "scores")
        best = self.node("ReduceMax", [scores], "best", axes=[2], keepdims=0)
        label = self.node("ArgMax", [scores], "label", axis=2, keepdims=0)
        limits = [("limit", np.int64(choice.limit)), ("iou", np.float32(choice.iou))]
        limits.append(("score", np.float32(choice.score)))
        chosen = self.node(
            "NonMaxSuppression",
            [
                self.apart(corners, label) if heads.classes > 1 else corners,
                self.node("Unsqueeze", [best, self.writer.ints([1])], "ranked"),
                *(self.writer.constant(f"{NMS}_{name}", np.array([value])) for name, value in limits),
            ],
            "chosen",
        )
        # Rows of a chosen box: image, class of this suppression (always 0), box.
        place = self.node("Gather", [chosen, self.writer.ints([0, 2])], "place", axis=1)
        image = self.writer.constant(f"{NMS}_first", np.array(0, np.int64))
        for name, source in zip(_OUTPUTS, (corners, best, label), strict=False):
            self.node("GatherND", [source, place], "", name)
        self.node("Gather", [chosen, image], "", "detection_images", axis=1)

    def node(self, op: str, inputs: Sequence[str], name: str, output: str = "", **attributes: Any) -> str:
        """Adds a node and returns the name of its result."""
        result = output or f"{NMS}_{name}"
        node = helper.make_node(op, list(inputs), [result], name=f"{NMS}/{name or output}", **attributes)
        self.writer.nodes.append(node)
        return result

    def columns(self, source: str, start: int, end: int, name: str) -> str:
        """Takes columns of the last axis."""
        bounds = [self.writer.ints([n]) for n in (start, end, 2)]
        return self.node("Slice", [source, *bounds], name)

    def corners(self, boxes: str) -> str:
        """Computes the corners of boxes that are stored as center and size."""
        center, size = self.columns(boxes, 0, 2, "center"), self.columns(boxes, 2, 4, "size")
        half = self.node("Mul", [size, self.writer.constant(f"{NMS}_0.5", np.float32(0.5))], "half")
        ends = [self.node(op, [center, half], name) for op, name in (("Sub", "low"), ("Add", "high"))]
        return self.node("Concat", ends, "corners", axis=2)

    def apart(self, corners: str, label: str) -> str:
        """Moves the boxes of each class away from the other boxes."""
        ends = [self.node(f"Reduce{n}", [corners], n.lower(), keepdims=0) for n in ("Max", "Min")]
        span = self.node("Sub", ends, "width")
        span = self.node("Add", [span, self.writer.constant(f"{NMS}_1", np.float32(1))], "span")
        number = self.node("Cast", [label], "number", to=TensorProto.FLOAT)
        shift = self.node("Mul", [number, span], "shift")
        shift = self.node("Unsqueeze", [shift, self.writer.ints([2])], "shift_of_box")
        return self.node("Add", [corners, shift], "apart")


def without_detections(model: ModelProto) -> bool:
    """Removes the choice of boxes from a file, so that its outputs are the graph's outputs.

    Returns:
        Whether there was any.
    """
    own = [node for node in model.graph.node if node.name.startswith(f"{NMS}/")]
    written = {name for node in own for name in node.output}
    for node in own:
        model.graph.node.remove(node)
    for info in [info for info in model.graph.output if info.name in written]:
        model.graph.output.remove(info)
    return bool(own)

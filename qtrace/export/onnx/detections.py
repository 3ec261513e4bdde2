"""Nodes after the outputs of a detector that choose its boxes, by NonMaxSuppression."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, ValueInfoProto, helper

from qtrace.errors import ExportError
from qtrace.export.detections import NMS, Heads, Suppression, find_heads
from qtrace.export.onnx.writer import OnnxWriter

__all__ = ["add_detections", "without_detections"]

# The outputs: type, and the sizes after the number of boxes.
_OUTPUTS: dict[str, tuple[int, tuple[int, ...]]] = {
    "detection_boxes": (TensorProto.FLOAT, (4,)),
    "detection_scores": (TensorProto.FLOAT, ()),
    "detection_classes": (TensorProto.INT64, ()),
    "detection_images": (TensorProto.INT64, ()),
}


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
    made = {name for node in own for name in node.output}
    for node in own:
        model.graph.node.remove(node)
    for info in [info for info in model.graph.output if info.name in made]:
        model.graph.output.remove(info)
    return bool(own)

"""Operators after the outputs of a detector that choose its boxes, by NON_MAX_SUPPRESSION_V5."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from qtrace.errors import ExportError
from qtrace.export.detections import NMS, Heads, Suppression, find_heads
from qtrace.graph.types import TensorNode
from qtrace.targets.tflite.layout import natural
from qtrace.targets.tflite.store import Store
from qtrace.targets.tflite.writer import FileTensor, TfliteWriter

__all__ = ["add_detections"]


def add_detections(
    store: Store, nodes: Sequence[TensorNode], names: Sequence[str], choice: Suppression
) -> list[tuple[str, FileTensor]]:
    """Adds the operators; the file takes batches of one image then.

    Args:
        store: the values of the graph.
        nodes: the outputs of the graph.
        names: their names in the file.
        choice: how boxes are chosen.

    Returns:
        Names and tensors of further outputs: ``detection_boxes`` (limit, 4) as corners (x1, y1, x2, y2),
        ``detection_scores`` (limit,), ``detection_classes`` (limit,), and ``detection_count``, the number of
        rows that are boxes; the rows after them have the score 0.

    Raises:
        ExportError: for an unknown output, or one of another shape, or another batch than one image.
    """
    shapes = [store.shape(node) for node in nodes]
    heads = find_heads(choice, list(zip(names, shapes, strict=True)))
    if shapes[heads.boxes][0] != 1:
        raise ExportError(
            f"nms in a TFLite file needs batches of one, and the model was traced with "
            f"{shapes[heads.boxes][0]}: trace it with one sample."
        )
    store.fixed = store.fixed or names[heads.boxes]
    floats = {}
    for place in heads.outputs:
        tensor = store.as_floats(store.ordered(nodes[place], natural(3)))
        if tensor.dtype != np.float32:
            raise ExportError(
                f"nms needs float outputs, and {names[place]} is {tensor.dtype.name}: name another."
            )
        floats[place] = tensor
    return _Operators(store.writer, heads).run(floats, choice)


class _Operators:
    """Writes the operators."""

    def __init__(self, writer: TfliteWriter, heads: Heads) -> None:
        self.writer, self.heads = writer, heads

    def run(self, floats: dict[int, FileTensor], choice: Suppression) -> list[tuple[str, FileTensor]]:
        """Writes all operators; returns the outputs."""
        heads, count = self.heads, self.heads.anchors
        boxes = self.columns(floats[heads.boxes], 0, 4, "raw")
        corners = self.corners(boxes) if choice.form == "cxcywh" else boxes
        scores = self.columns(floats[heads.scores], heads.first, heads.classes, "of_classes")
        if heads.objectness is not None:
            factor = self.columns(floats[heads.objectness], heads.factor, 1, "objectness")
            scores = self.add("MUL", [scores, factor], "scores", scores.shape, kind="MulOptions")
        best = self.add("REDUCE_MAX", [scores, [1]], "best", [count], kind="ReducerOptions")
        axis = self.writer.constant(f"{NMS}_axis", np.array(1, np.int32))
        label = self.add(
            "ARG_MAX", [scores, axis], "label", [count], np.int32, kind="ArgMaxOptions", outputType=2
        )
        limits = [
            np.array(choice.limit, np.int32),
            *(np.array(n, np.float32) for n in (choice.iou, choice.score, 0)),
        ]
        settings = [
            self.writer.constant(f"{NMS}_{name}", value)
            for name, value in zip(("limit", "iou", "score", "sigma"), limits, strict=True)
        ]
        apart = self.apart(corners, label) if heads.classes > 1 else corners
        chosen = self.writer.tensor(f"{NMS}_chosen", [choice.limit], np.int32)
        kept = self.writer.tensor("detection_scores", [choice.limit])
        number = self.writer.tensor("detection_count", [], np.int32)
        self.writer.op(
            "NON_MAX_SUPPRESSION_V5",
            [apart, best, *settings],
            [chosen, kept, number],
            "NonMaxSuppressionV5Options",
        )
        gathered, labels = (
            self.writer.add(
                "GATHER", [source, chosen], name, shape, source.dtype, kind="GatherOptions", axis=0
            )
            for source, name, shape in (
                (corners, "detection_boxes", [choice.limit, 4]),
                (label, "detection_classes", [choice.limit]),
            )
        )
        return [(tensor.name, tensor) for tensor in (gathered, kept, labels, number)]

    def add(
        self, code: str, inputs: Any, name: str, shape: Any, dtype: Any = np.float32, **options: Any
    ) -> FileTensor:
        """Adds an operator; returns its result."""
        return self.writer.add(code, inputs, f"{NMS}_{name}", shape, dtype, **options)

    def columns(self, source: FileTensor, start: int, count: int, name: str) -> FileTensor:
        """Takes columns of the last axis, without the axis of the batch."""
        rows = source.shape[1]
        if count < source.shape[2]:
            bounds = [[0, 0, start], [1, rows, count]]
            source = self.add("SLICE", [source, *bounds], name, [1, rows, count], kind="SliceOptions")
        shape = [rows, count]
        return self.add("RESHAPE", [source, shape], f"{name}_rows", shape, kind="ReshapeOptions")

    def corners(self, boxes: FileTensor) -> FileTensor:
        """Computes the corners of boxes that are stored as center and size."""
        rows = boxes.shape[0]
        center, size = (
            self.add("SLICE", [boxes, [0, start], [rows, 2]], name, [rows, 2], kind="SliceOptions")
            for start, name in ((0, "center"), (2, "size"))
        )
        half = self.add("MUL", [size, self.number(0.5)], "half", [rows, 2], kind="MulOptions")
        ends = [
            self.add(code, [center, half], name, [rows, 2], kind=f"{code.title()}Options")
            for code, name in (("SUB", "low"), ("ADD", "high"))
        ]
        return self.add("CONCATENATION", ends, "corners", [rows, 4], kind="ConcatenationOptions", axis=1)

    def apart(self, corners: FileTensor, label: FileTensor) -> FileTensor:
        """Moves the boxes of each class away from the other boxes."""
        rows = corners.shape[0]
        ends = [
            self.add(f"REDUCE_{n}", [corners, [0, 1]], n.lower(), [], kind="ReducerOptions")
            for n in ("MAX", "MIN")
        ]
        width = self.add("SUB", ends, "width", [], kind="SubOptions")
        span = self.add("ADD", [width, self.number(1.0)], "span", [], kind="AddOptions")
        number = self.add("CAST", [label], "number", [rows], kind="CastOptions")
        shift = self.add("MUL", [number, span], "shift", [rows], kind="MulOptions")
        shift = self.add("RESHAPE", [shift, [rows, 1]], "shift_of_box", [rows, 1], kind="ReshapeOptions")
        return self.add("ADD", [corners, shift], "apart", [rows, 4], kind="AddOptions")

    def number(self, value: float) -> FileTensor:
        """A constant."""
        return self.writer.constant(f"{NMS}_{value:g}", np.array(value, np.float32))

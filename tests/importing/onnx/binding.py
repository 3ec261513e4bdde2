"""Binds the inputs that MegEngine needs as attributes to the values of the test."""

from __future__ import annotations

import numpy as np
from onnx import ModelProto, numpy_helper

from tests.importing.onnx.cases import Case

__all__ = ["BOUND", "bind"]

_REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
# Op -> the positions of its inputs that say what is computed and are no data: axes, pads, sizes, places...
BOUND: dict[str, tuple[int, ...]] = {
    **{f"Reduce{name}": (1,) for name in _REDUCTIONS},
    **{"Squeeze": (1,), "Unsqueeze": (1,), "Reshape": (1,), "Expand": (1,), "Tile": (1, 2), "Split": (1,)},
    **{"Slice": (1, 2, 3, 4), "Pad": (1, 2, 3), "Resize": (1, 2, 3), "Upsample": (1,), "TopK": (1,)},
    **{"ConstantOfShape": (0,), "Range": (0, 1, 2), "OneHot": (1, 2), "CumSum": (1,), "CumProd": (1,)},
    **{"Trilu": (1,), "MaxUnpool": (2,), "Dropout": (1, 2), "NonMaxSuppression": (2, 3, 4)},
    **{"CenterCropPad": (1,), "AffineGrid": (1,), "Col2Im": (1, 2), "DFT": (1, 2), "STFT": (1, 3)},
    **{"BlackmanWindow": (0,), "HammingWindow": (0,), "HannWindow": (0,), "MelWeightMatrix": (0, 1, 2, 3, 4)},
    **{"SplitToSequence": (1,), "ReverseSequence": (1,), "Loop": (0, 1), "If": (0,)},
    **{"Scatter": (1,), "ScatterElements": (1,), "ScatterND": (1,)},
    **{"QuantizeLinear": (1, 2), "DequantizeLinear": (1, 2)},
    **{"QLinearMatMul": (1, 2, 4, 5, 6, 7), "QLinearConv": (1, 2, 4, 5, 6, 7)},
}


def bind(case: Case, base: Case | None = None) -> tuple[ModelProto, dict[str, np.ndarray | None]]:
    """Makes initializers of the inputs that MegEngine needs as attributes.

    Args:
        case: the case.
        base: the case that has one op where ``case`` has the body of the op's function; its bound inputs are
            bound by name, too.

    Returns:
        The model, and the inputs that are left by name.
    """
    values = dict(zip(case.input_names, case.inputs, strict=False))
    bound = _bound_names(case.model) | (_bound_names(base.model) if base is not None else set())
    model = ModelProto()
    model.CopyFrom(case.model)
    for name in sorted(bound & values.keys()):
        value = values[name]
        if value is None:
            continue
        model.graph.initializer.append(numpy_helper.from_array(value, name))
        index = [item.name for item in model.graph.input].index(name)
        del model.graph.input[index]
        del values[name]
    return model, values


def _bound_names(model: ModelProto) -> set[str]:
    names: set[str] = set()
    for node in model.graph.node:
        positions = BOUND.get(node.op_type, ())
        names.update(node.input[i] for i in positions if i < len(node.input) and node.input[i])
    return names

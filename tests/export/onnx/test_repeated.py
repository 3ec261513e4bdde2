"""Tensors that the imported file computes of stored ones are written computed where that is smaller."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime
from onnx import numpy_helper

import qtrace
from tests.each import each_of
from tests.importing.onnx.networks import model, node, save, weights

SIZES = np.array([1, 4, 32, 32])
HALF = numpy_helper.from_array(np.array([0.5], np.float32))
FORMS = {
    "Expand": ([node("Expand", "b sizes", "e")], {"b": weights(4, 1, 1), "sizes": SIZES}),
    "Expand along one axis": ([node("Expand", "b sizes", "e")], {"b": weights(4, 32, 1), "sizes": SIZES}),
    "Tile": ([node("Tile", "b times", "e")], {"b": weights(1, 4, 8, 8), "times": np.array([1, 1, 4, 4])}),
    "ConstantOfShape": ([node("ConstantOfShape", "sizes", "e", value=HALF)], {"sizes": SIZES}),
    "Range": (
        [node("Range", "a b c", "r"), node("Reshape", "r s", "t"), node("Expand", "t sizes", "e")],
        {
            **{"a": np.float32(-3), "b": np.float32(61), "c": np.float32(2)},
            **{"s": np.array([1, 1, 32, 1]), "sizes": SIZES},
        },
    ),
    "Concat of grids": (
        [
            node("Range", "a b c", "r"),
            *(node("Reshape", f"r {s}", f"{s}r") for s in "st"),
            *(node("Expand", f"{s}r half", f"{s}e") for s in "st"),
            node("Concat", "se te", "g", axis=1),
            node("Div", "g b", "e"),
        ],
        {
            **{"a": np.float32(0), "b": np.float32(32), "c": np.float32(1), "half": np.array([1, 2, 32, 32])},
            **{"s": np.array([1, 1, 32, 1]), "t": np.array([1, 1, 1, 32])},
        },
    ),
    "waves": (
        [
            *(node("Range", "a b c", "r"), node("Reshape", "r s", "t"), node("Mul", "t f", "p")),
            *(node("Sin", "p", "i"), node("Expand", "i sizes", "e")),
        ],
        {
            **{"a": np.float32(0), "b": np.float32(32), "c": np.float32(1), "f": weights(1, 4, 1, 1)},
            **{"s": np.array([1, 1, 1, 32]), "sizes": SIZES},
        },
    ),
    "triangle": (
        [node("ConstantOfShape", "sizes", "o", value=HALF), node("Trilu", "o", "e")],
        {"sizes": SIZES},
    ),
}


def _next_to_each_other() -> tuple[list[onnx.NodeProto], dict[str, np.ndarray]]:
    """All forms, each added to the one input: the nodes and the tensors, with the number of the form."""
    nodes, tensors = list[onnx.NodeProto](), dict[str, np.ndarray]()
    for number, (own, stored) in enumerate(FORMS.values()):
        tensors |= {f"{name}{number}": array for name, array in stored.items()}
        for each in (*own, node("Add", "x e", "y")):
            nodes.append(copied := onnx.NodeProto())
            copied.CopyFrom(each)
            copied.input[:] = [name if name == "x" else f"{name}{number}" for name in each.input]
            copied.output[:] = [f"{name}{number}" for name in each.output]
    return nodes, tensors


def test_what_the_source_computes_is_written_computed(tmp_path: Path) -> None:
    nodes, stored = _next_to_each_other()
    outputs = [f"y{number}" for number in range(len(FORMS))]
    source = save(model(nodes, {"x": ["n", 4, 32, 32]}, outputs, stored=stored, opset=14), tmp_path)
    data = np.random.default_rng(1).normal(size=(8, 4, 32, 32)).astype(np.float32)
    qtrace.export(qtrace.from_onnx(source, {"x": data.shape}), tmp_path / "float.onnx")
    qtrace.quantize(source, data, tmp_path / "int8.onnx", recipe="w8a8", progress=False, measure=False)
    expected = onnxruntime.InferenceSession(source).run(None, {"x": data})
    for name, tolerance in (("float.onnx", 1e-6), ("int8.onnx", 0.02)):
        file = onnx.load(tmp_path / name)
        assert max(np.prod(tensor.dims) for tensor in file.graph.initializer) <= 256
        results = onnxruntime.InferenceSession(tmp_path / name).run(None, {"x": data})
        for form, result, wanted in zip(FORMS, results, expected, strict=True):
            assert np.abs(result - wanted).mean() <= tolerance * np.abs(wanted).max(), form


ADDED = node("Add", "x e", "y")
EXPANDED = node("Expand", "b sizes", "e")
LOOP = onnx.parser.parse_graph(
    "g (int64 i, bool c, float[1,4,32,1] s) => (bool d, float[1,4,32,1] t) { d = Identity(c) t = Cos(s) }"
)
CASES = {
    "axes of an older opset": (
        [node("Unsqueeze", "r", "u", axes=[0]), node("Expand", "u sizes", "e"), ADDED],
        {"opset": 11},
        True,
    ),
    "mask of bools": (
        [
            *(node("Greater", "b zero", "m"), node("Expand", "m sizes", "e")),
            node("Where", "e x zero", "y"),
        ],
        {},
        True,
    ),
    "also an output": ([EXPANDED, ADDED, node("Identity", "e", "z")], {"outputs": ("y", "z")}, True),
    "in a loop, which runs in each call": (
        [node("Loop", "count true b", "l", body=LOOP), node("Expand", "l sizes", "e"), ADDED],
        {},
        False,
    ),
    "op of another domain": (
        [EXPANDED, node("Gelu", "e", "f", domain="com.microsoft"), node("Add", "x f", "y")],
        {"opset": 20},
        False,
    ),
}


@each_of("case", CASES)
def test_nodes_are_written_that_runtimes_compute_once(case: str, tmp_path: Path) -> None:
    nodes, options, computed = CASES[case]
    stored = {
        **{"b": weights(1, 4, 32, 1), "r": weights(4, 32, 1), "sizes": SIZES},
        **{"zero": np.float32(0), "count": np.array(3), "true": np.array(True)},
    }
    stored = {name: array for name, array in stored.items() if any(name in n.input for n in nodes)}
    proto = model(nodes, {"x": [1, 4, 32, 32]}, stored=stored, **{"opset": 14, **options})
    proto.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    source, written = save(proto, tmp_path), tmp_path / "float.onnx"
    qtrace.export(qtrace.from_onnx(source), written)
    assert (written.stat().st_size < 4 * 32 * 32) == computed
    feeds = {"x": weights(1, 4, 32, 32)}
    expected, results = (onnxruntime.InferenceSession(file).run(None, feeds) for file in (source, written))
    for one, other in zip(expected, results, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_kernels_stay_stored(tmp_path: Path) -> None:
    stored = {"w": np.ones((4, 1, 9, 9), np.float32)}
    source = save(model([node("Conv", "x w", "y", group=4)], {"x": [1, 4, 20, 20]}, stored=stored), tmp_path)
    qtrace.export(qtrace.from_onnx(source), tmp_path / "float.onnx")
    assert [n.op_type for n in onnx.load(tmp_path / "float.onnx").graph.node] == ["Conv"]

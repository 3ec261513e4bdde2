"""Axes that a file leaves open stay open, and sizes that depend on them are computed by the graph."""

from __future__ import annotations

import logging
from pathlib import Path

import megengine as mge
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

import qtrace
from qtrace.data.batches import as_arguments
from qtrace.graph.open_axes import read_open_axes
from qtrace.importing.onnx import opening
from qtrace.onnxfile.local_session import LocalSession
from tests.each import each_of
from tests.importing.onnx.networks import model, node, save, weights

IMAGE = {"x": ["batch", 2, "rows.0", "?"]}
SHAPE = {"x": (1, 2, 16, 24)}
SIZES = ((1, 2, 16, 24), (2, 2, 8, 40), (3, 2, 21, 19))


def run_file(path: Path, x: np.ndarray) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: x})


def declared(path: Path) -> list[list[int | str]]:
    graph = onnx.load(path).graph
    ends = (*graph.input, *graph.output)
    return [[d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in ends]


def check_stays_open(path: Path, folder: Path) -> None:
    """Checks that no axis is fixed by import and export, and the values at other sizes."""
    net = qtrace.from_onnx(path, SHAPE)
    record = read_open_axes(net)
    assert record is not None
    assert not record.fixed
    check_sizes(path, net)
    exported = qtrace.export(net, folder / "again.onnx")
    assert declared(exported)[0] == ["batch", 2, "rows.0", "?"]
    check_sizes(exported, net)


def check_sizes(path: Path, net: object, sizes: tuple[tuple[int, ...], ...] = SIZES) -> None:
    for index, shape in enumerate(sizes):
        x = weights(*shape, seed=index)
        (expected,) = run_file(path, x)
        result = net(mge.Tensor(x)).numpy()
        assert result.shape == expected.shape, shape
        np.testing.assert_allclose(result, expected, rtol=0, atol=1e-5 * max(1, np.abs(expected).max()))


def convolutional() -> onnx.ModelProto:
    nodes = [
        node("Conv", "x w", "c", pads=[1, 1, 1, 1], strides=[2, 2]),
        node("Relu", "c", "r"),
        node("MaxPool", "r", "p", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
        node("Resize", "p _ scales", "u", mode="nearest", nearest_mode="floor",
             coordinate_transformation_mode="asymmetric"),
        node("Conv", "u v", "y"),
    ]  # fmt: skip
    stored = {"w": weights(4, 2, 3, 3), "v": weights(3, 4, 1, 1), "scales": np.float32([1, 1, 2, 2])}
    return model(nodes, IMAGE, stored=stored)


def test_open_axes_keep_their_names_from_file_to_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = save(convolutional(), tmp_path)
    net = qtrace.from_onnx(path, SHAPE)
    check_sizes(path, net)
    qtrace.save(net, tmp_path / "net.mge")
    prepared = qtrace.prepare(qtrace.load(tmp_path / "net.mge"))
    batches = [weights(2, 2, 16, 8 + 8 * i, seed=i) for i in range(4)]
    qtrace.calibrate(prepared, batches)
    converted = qtrace.convert(prepared)
    exported = qtrace.export(converted, tmp_path / "int8.onnx")
    ends = declared(exported)
    assert ends[0] == ["batch", 2, "rows.0", "?"]
    assert ends[1] == ["batch", 3, "y_2", "y_3"]
    with caplog.at_level(logging.INFO, "qtrace"):
        assert qtrace.verify(exported, converted, [weights(*shape) for shape in SIZES]).passed
    assert "verified at (1, 2, 32, 56), too" in caplog.text


def test_an_axis_may_be_fixed_by_the_user(tmp_path: Path) -> None:
    path = save(convolutional(), tmp_path)
    net = qtrace.from_onnx(path, SHAPE, fixed=True)
    exported = qtrace.export(net, tmp_path / "fixed.onnx")
    assert declared(exported)[0] == ["batch", 2, 16, 24]


# The nodes that compute a shape from "s", the shape of x (n, 2, h, w), and reshape x to it.
RESHAPES = {
    "flattened": [node("Slice", "s zero one", "n"), node("Concat", "n minus", "t", axis=0)],
    "rows": [
        node("Gather", "s two", "h", axis=0), node("Gather", "s zero", "n", axis=0),
        node("Concat", "n h minus", "t", axis=0),
    ],
    "product": [
        node("Gather", "s zero", "n", axis=0), node("Slice", "s two four", "hw"),
        node("ReduceProd", "hw", "area", axes=[0], keepdims=1), node("Concat", "n two area", "t", axis=0),
    ],
    "times": [
        node("Gather", "s scalar", "h0", axis=0), node("Mul", "h0 scalar", "h1"),
        node("Unsqueeze", "h1 zero", "h"), node("Concat", "minus h", "t", axis=0),
    ],
    "quotient": [
        node("Size", "x", "all"), node("Gather", "s scalar", "h0", axis=0), node("Div", "all h0", "rest"),
        node("Unsqueeze", "rest zero", "r"), node("Unsqueeze", "h0 zero", "h"),
        node("Concat", "h r", "t", axis=0),
    ],
    "where": [
        node("Equal", "s minus", "e"), node("Where", "e ones s", "w"), node("Identity", "w", "t"),
    ],
    "floats": [
        node("Cast", "s", "f", to=1), node("Mul", "f half", "g"), node("Mul", "g double", "k"),
        node("Floor", "k", "l"), node("Cast", "l", "t", to=7),
    ],
}  # fmt: skip


@each_of("name", RESHAPES)
def test_sizes_are_computed_as_in_the_file(tmp_path: Path, name: str) -> None:
    stored = {
        **{"zero": np.array([0]), "one": np.array([1]), "two": np.array([2]), "four": np.array([4])},
        **{"minus": np.array([-1]), "scalar": np.array(2), "ones": np.ones(4, np.int64)},
        **{"half": np.float32(0.5), "double": np.float32(2)},
    }
    nodes = [node("Shape", "x", "s"), *RESHAPES[name], node("Reshape", "x t", "y")]
    read = {i for n in nodes for i in n.input}
    path = save(model(nodes, IMAGE, stored={k: v for k, v in stored.items() if k in read}), tmp_path)
    check_stays_open(path, tmp_path)


def test_a_map_takes_the_size_of_another_one(tmp_path: Path) -> None:
    nodes = [
        node("Conv", "x w", "a", pads=[1, 1, 1, 1]),
        node("MaxPool", "a", "d", kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1),
        node("Shape", "a", "s"),
        node("Slice", "s two four", "size"),
        node("Shape", "d", "t"),
        node("Slice", "t zero two", "front"),
        node("Concat", "front size", "sizes", axis=0),
        node("Resize", "d _ _ sizes", "u", mode="linear", coordinate_transformation_mode="half_pixel"),
        node("Concat", "u a", "y", axis=1),
    ]
    stored = {"w": weights(3, 2, 3, 3), "zero": np.array([0]), "two": np.array([2]), "four": np.array([4])}
    path = save(model(nodes, IMAGE, stored=stored), tmp_path)
    net = qtrace.from_onnx(path, SHAPE)
    check_sizes(path, net)
    exported = qtrace.export(net, tmp_path / "again.onnx")
    assert declared(exported) == [["batch", 2, "rows.0", "?"], ["batch", 6, "rows.0", "?"]]
    check_sizes(exported, net)


def test_numbers_are_counted_filled_and_cut_by_sizes(tmp_path: Path) -> None:
    nodes = [
        node("Shape", "x", "s"),
        node("Gather", "s three", "w", axis=0),
        node("Range", "none w step", "places"),
        node("Cast", "places", "p", to=1),
        node("ConstantOfShape", "s", "zeros", value=numpy_helper.from_array(np.float32([0.5]))),
        node("Add", "zeros p", "z"),
        node("Div", "w halves", "h"),
        node("Unsqueeze", "h axis", "h1"),
        node("Add", "x z", "sum"),
        node("Slice", "sum axis h1 last", "y"),
    ]
    stored = {
        **{"three": np.array(3), "none": np.array(0), "step": np.array(1), "halves": np.array(2)},
        **{"axis": np.array([0]), "last": np.array([3])},
    }
    path = save(model(nodes, IMAGE, stored=stored), tmp_path)
    check_stays_open(path, tmp_path)


# A row of numbers as long as the last axis of x, from "w", its size, and "w1", its size as a vector.
ROWS = {
    "the first rows of a table": [node("Slice", "table zero w1 zero", "row")],
    "the last rows of a table": [
        node("Sub", "end w1", "begin"), node("Slice", "table begin end zero", "row"),
    ],
    "one row of a table": [node("Sub", "w three", "place"), node("Gather", "table place", "row", axis=0)],
    "numbers from the last one back": [
        node("Sub", "w back", "last"), node("Neg", "w", "negative"), node("Add", "last negative", "stop"),
        node("Add", "last w", "begin"), node("Sub", "stop negative", "end2"),
        node("Range", "begin end2 minus", "places"), node("Cast", "places", "row", to=1),
    ],
    "whole numbers in float32": [
        node("Cast", "w", "f", to=1), node("Range", "none f step", "row"),
    ],
    "steps of two from three on in float32": [
        node("Add", "w w", "twice"), node("Add", "twice three", "stop"), node("Cast", "stop", "f", to=1),
        node("Range", "begun f two", "row"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_taken_or_counted_by_a_size(tmp_path: Path, name: str) -> None:
    nodes = [
        node("Shape", "x", "s"),
        node("Gather", "s three", "w", axis=0),
        node("Unsqueeze", "w zero", "w1"),
        *ROWS[name],
        node("Add", "x row", "y"),
    ]
    stored = {
        **{"three": np.array(3), "zero": np.array([0]), "end": np.array([64]), "table": weights(64)},
        **{"none": np.float32(0), "step": np.float32(1), "begun": np.float32(3), "two": np.float32(2)},
        **{"back": np.array(1), "minus": np.array(-1)},
    }
    read = {i for n in nodes for i in n.input}
    stored = {k: v for k, v in stored.items() if k in read}
    path = save(model(nodes, IMAGE, stored=stored), tmp_path)
    check_stays_open(path, tmp_path)


def test_fractions_up_to_a_size_fix_its_axis(tmp_path: Path) -> None:
    nodes = [
        node("Shape", "x", "s"),
        node("Gather", "s three", "w", axis=0),
        node("Cast", "w", "f", to=1),
        node("Range", "half f one", "row"),
        node("Add", "x row", "y"),
    ]
    stored = {"three": np.array(3), "half": np.float32(0.5), "one": np.float32(1)}
    path = save(model(nodes, IMAGE, stored=stored), tmp_path)
    record = read_open_axes(qtrace.from_onnx(path, SHAPE))
    assert record is not None
    assert ["counts in fractions" in item.reason for item in record.fixed] == [True]


FIXING = {
    "Add 'y'": ([node("Add", "x table", "y")], {"table": weights(1, 2, 16, 24)}),
    "Reshape 'y'": ([node("Reshape", "x t", "y")], {"t": np.array([0, 2, 16, 24])}),
    "MaxPool 'y' has auto_pad": (
        [node("MaxPool", "x", "y", kernel_shape=[3, 3], strides=[2, 2], auto_pad="SAME_UPPER")], {},
    ),
    "AveragePool 'y' counts the places": (
        [node("AveragePool", "x", "y", kernel_shape=[3, 3], strides=[2, 2], pads=[0, 0, 1, 1])], {},
    ),
}  # fmt: skip


# Forms of ops that need the number where MegEngine computes them, and are kept as in the file instead.
KEPT = {
    "cubic factor": node("Resize", "x _ factors", "y", mode="cubic"),
    "cubic sizes": node("Resize", "x _ _ twice", "y", mode="cubic"),
    "fractions": node(
        "Resize", "x _ fractions", "y", mode="linear", coordinate_transformation_mode="asymmetric"
    ),
    "nearest sizes": node("Resize", "x _ _ half", "y", mode="nearest", nearest_mode="ceil"),
    "smoothed": node("Resize", "x _ _ half", "y", mode="linear", antialias=1),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("form", KEPT)
def test_an_image_is_resized_as_in_the_file_where_its_size_is_open(tmp_path: Path, form: str) -> None:
    """Sizes that are computed from open axes are known to what follows, also in a graph that was loaded."""
    nodes = [
        *(
            node("Shape", "x", "s"),
            node("Slice", "s zero two", "front"),
            node("Slice", "s two four", "image"),
        ),
        *(node("Mul", "image two", "double"), node("Div", "image two", "single")),
        *(node("Concat", "front double", "twice", axis=0), node("Concat", "front single", "half", axis=0)),
        *(KEPT[form], node("Conv", "y w", "c", pads=[1, 1, 1, 1]), node("Relu", "c", "z")),
    ]
    factors = {"factors": np.float32([1, 1, 2, 2]), "fractions": np.float32([1, 1, 1.5, 0.7])}
    numbers = {"zero": np.array([0]), "two": np.array([2]), "four": np.array([4])}
    stored = {**factors, **numbers, "w": weights(2, 2, 3, 3)}
    used = {name for each in nodes for name in each.input}
    stored = {name: array for name, array in stored.items() if name in used}
    path = save(model(nodes, IMAGE, ("z",), stored, opset=18), tmp_path)
    check_stays_open(path, tmp_path)
    qtrace.save(qtrace.from_onnx(path, SHAPE), tmp_path / "net.mge")
    prepared = qtrace.prepare(qtrace.load(tmp_path / "net.mge"), {"placement": "everything"})
    qtrace.calibrate(prepared, [weights(2, 2, 16, 8 + 8 * i, seed=i) for i in range(4)], progress=False)
    converted = qtrace.convert(prepared)
    exported = qtrace.export(converted, tmp_path / "int8.onnx")
    assert declared(exported)[0] == ["batch", 2, "rows.0", "?"]
    assert all(isinstance(size, str) for size in declared(exported)[1][2:])
    assert qtrace.verify(exported, converted, [weights(*shape) for shape in SIZES]).passed


@pytest.mark.parametrize("axis", [1, 2, 3])
def test_the_largest_along_and_beside_open_axes(tmp_path: Path, axis: int) -> None:
    """Routers choose among experts, beside an open batch and an open number of tokens."""
    nodes = [node("TopK", "x k", "y i", axis=axis)]
    check_stays_open(save(model(nodes, IMAGE, stored={"k": np.array([2])}), tmp_path), tmp_path)


@pytest.mark.parametrize("reason", FIXING)
def test_what_needs_a_number_fixes_its_axis_and_is_named(
    tmp_path: Path, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    nodes, stored = FIXING[reason]
    path = save(model(nodes, IMAGE, stored=stored), tmp_path)
    with caplog.at_level(logging.WARNING, "qtrace"):
        net = qtrace.from_onnx(path, SHAPE)
    record = read_open_axes(net)
    assert record is not None
    assert {axis.axis for axis in record.fixed} == {2, 3}
    assert reason.split(" has ")[0] in caplog.text
    exported = qtrace.export(net, tmp_path / "again.onnx")
    assert declared(exported)[0] == ["batch", 2, 16, 24]
    check_sizes(path, net, (SIZES[0], (3, 2, 16, 24)))
    with pytest.raises(qtrace.QtraceError, match=r"fixes it to .*axis 2 \(rows\.0\) of input x is fixed: "):
        as_arguments(weights(1, 2, 16, 48), net)


@pytest.mark.parametrize("width", [325, 33])
def test_a_coarse_map_is_open_at_a_width_that_no_power_of_two_divides(tmp_path: Path, width: int) -> None:
    nodes = [
        node("Conv", "x w", "c", pads=[0, 0, 2, 2], strides=[8, 8]),
        node("Shape", "c", "s"),
        node("Slice", "s zero two", "front"),
        node("Concat", "front minus", "t", axis=0),
        node("Reshape", "c t", "y"),
    ]
    stored = {"w": weights(4, 2, 3, 3), "zero": np.array([0]), "two": np.array([2]), "minus": np.array([-1])}
    path = save(model(nodes, IMAGE, stored=stored), tmp_path)
    net = qtrace.from_onnx(path, {"x": (1, 2, 16, width)})
    exported = qtrace.export(net, tmp_path / "again.onnx")
    assert declared(exported)[1][:2] == ["batch", 4]
    assert isinstance(declared(exported)[1][2], str)
    for each in (path, exported):
        check_sizes(each, net, ((3, 2, 16, width + 43), (2, 2, 24, 2 * width)))


def test_the_proof_at_other_sizes_takes_few_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []
    run = LocalSession.run

    def spy(self: LocalSession, names: object, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        shapes.append(feeds["x"].shape)
        return run(self, names, feeds)

    monkeypatch.setattr(LocalSession, "run", spy)
    path = save(convolutional(), tmp_path)
    qtrace.from_onnx(path, {"x": (1, 2, 640, 640)})
    assert shapes == [(2, 2, 128, 160), (2, 2, 127, 159)]


def test_values_without_digits_are_compared_at_a_larger_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sigmoid near 0 rounds to the precision of 1 in MegEngine, and not in onnxruntime."""
    nodes = [
        node("GlobalAveragePool", "x", "mean"), node("Mul", "x zero", "none"), node("Add", "none mean", "z"),
        node("Sub", "z shift", "s"), node("Sigmoid", "s", "y"),
    ]  # fmt: skip
    path = save(model(nodes, IMAGE, stored={"shift": np.float32(11), "zero": np.float32(0)}), tmp_path)
    tried = []
    is_equal = opening._FileRuns.is_equal

    def spy(self: opening._FileRuns, *args: object) -> bool | None:
        tried.append(is_equal(self, *args))
        return tried[-1]

    monkeypatch.setattr(opening._FileRuns, "is_equal", spy)
    record = read_open_axes(qtrace.from_onnx(path, {"x": (1, 2, 640, 640)}))
    assert record is not None
    assert not record.fixed
    assert tried[:2] == [None, None]


def test_a_network_that_takes_no_small_size_is_compared_at_an_odd_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused small sizes of both kinds use up no comparison at a larger size of each kind."""
    is_equal, compared = opening._FileRuns.is_equal, []

    def refuse_small(self: opening._FileRuns, traced: object, inputs: list, arrays: object) -> bool | None:
        rows, columns = inputs[0].shape[2:]
        if rows < 448 or columns < 448:
            raise opening._NoSuchSizeError("the kernel is larger than the map")
        compared.append(columns % 2)
        return is_equal(self, traced, inputs, arrays)  # type: ignore[arg-type]

    monkeypatch.setattr(opening._FileRuns, "is_equal", refuse_small)
    path = save(convolutional(), tmp_path)
    qtrace.from_onnx(path, shapes={"x": (1, 2, 448, 448)})
    assert compared == [0, 1]


_FAR = 2**31 - 1


@each_of(
    ("start", "end", "step"),
    [
        (24, 0, -1),
        (9, 2, -3),
        (9, -_FAR, -2),
        (_FAR, -_FAR, -1),
        (_FAR, 3, -2),
        (-1, -_FAR, -1),
        (-2, -9, -3),
    ],
)
def test_an_open_axis_is_walked_back_at_every_size(tmp_path: Path, start: int, end: int, step: int) -> None:
    """A place behind the end of a shorter axis means its end, for which MegEngine has an error."""
    stored = {name: np.array([v]) for name, v in (("from", start), ("to", end), ("axis", 3), ("by", step))}
    path = save(model([node("Slice", "x from to axis by", "y")], IMAGE, stored=stored), tmp_path)
    net = qtrace.from_onnx(path, SHAPE)
    sizes = (*SIZES, (1, 2, 4, 12))
    check_sizes(path, net, sizes)
    exported = qtrace.export(net, tmp_path / "again.onnx")
    assert declared(exported)[0] == ["batch", 2, "rows.0", "?"]
    check_sizes(exported, net, sizes)


def test_places_from_both_ends_of_an_open_axis_are_not_walked_back(tmp_path: Path) -> None:
    stored = {name: np.array([v]) for name, v in (("from", 9), ("to", -20), ("axis", 3), ("by", -1))}
    path = save(model([node("Slice", "x from to axis by", "y")], IMAGE, stored=stored), tmp_path)
    record = read_open_axes(qtrace.from_onnx(path, SHAPE))
    assert record is not None
    assert [(axis.axis, "both ends" in axis.reason) for axis in record.fixed] == [(3, True)]


NORMS = {
    # As torch writes its GroupNorm.
    "groups joined": [
        node("Reshape", "c split", "s"),
        node("InstanceNormalization", "s ones zeros", "n"),
        node("Shape", "c", "whole"),
        node("Reshape", "n whole", "j"),
        node("Mul", "j w4", "y"),
    ],
    "groups": [node("GroupNormalization", "c gain bias", "y", num_groups=2)],
    "instance": [node("InstanceNormalization", "c gain bias", "y")],
    "instance of rows": [
        node("Reshape", "c rows", "s"),
        node("InstanceNormalization", "s gain bias", "y"),
    ],
    "instance of volumes": [
        node("Unsqueeze", "c last", "s"),
        node("InstanceNormalization", "s gain bias", "y"),
    ],
    "groups of volumes": [
        node("Unsqueeze", "c last", "s"),
        node("GroupNormalization", "s gain bias", "y", num_groups=2),
    ],
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("nodes", NORMS.values(), ids=NORMS)
def test_a_norm_of_channels_leaves_its_places_open(nodes: list[onnx.NodeProto], tmp_path: Path) -> None:
    """A network with GroupNorm had fixed sizes in the file that was written."""
    stored = {
        "w": weights(4, 2, 3, 3),
        "w4": weights(4, 1, 1),
        "gain": weights(4) + 2,
        "bias": weights(4, seed=1),
        "ones": np.ones(2, np.float32),
        "zeros": np.zeros(2, np.float32),
        "split": np.int64([0, 2, -1]),
        "rows": np.int64([0, 4, -1]),
        "last": np.int64([4]),
    }
    read = {name for own in nodes for name in own.input}
    kept = {name: value for name, value in stored.items() if name in read or name == "w"}
    whole = [node("Conv", "x w", "c", pads=[1, 1, 1, 1], strides=[2, 2]), *nodes]
    check_stays_open(save(model(whole, IMAGE, stored=kept, opset=21), tmp_path), tmp_path)


@pytest.mark.quick(2)
@pytest.mark.parametrize("upper", [0, 1])
@pytest.mark.parametrize("offset", [-2, 0, 1, 30])
@pytest.mark.parametrize("of", ["image", "mask", "infinity"])
def test_a_triangle_of_open_axes(of: str, upper: int, offset: int, tmp_path: Path) -> None:
    """Causal masks of text models are made so, which had a fixed length in the file that was written."""
    triangle = {"image": "x", "mask": "above", "infinity": "lowest"}[of]
    nodes = [
        node("Trilu", f"{triangle} k", "t", upper=upper),
        {
            "image": node("Relu", "t", "y"),
            "mask": node("Where", "t x zero", "y"),
            "infinity": node("Max", "t x", "y"),
        }[of],
    ]
    stored = {"k": np.int64(offset)}
    if of == "mask":
        nodes.insert(0, node("Greater", "x zero", "above"))
        stored["zero"] = np.float32(0)
    if of == "infinity":
        nodes[:0] = [
            node("Shape", "x", "sizes"),
            node("ConstantOfShape", "sizes", "lowest", value=numpy_helper.from_array(np.float32([-np.inf]))),
        ]
    check_stays_open(save(model(nodes, IMAGE, stored=stored, opset=16), tmp_path), tmp_path)


def _text(table: int) -> onnx.ModelProto:
    """Adds the first rows of a table of positions to embeddings, as BERT does."""
    nodes = [
        node("Gather", "words ids", "e"),
        node("Shape", "ids", "s", start=1),
        node("Slice", "positions zero s zero", "p"),
        node("Add", "e p", "x"),
        node("MatMul", "x w", "y"),
    ]
    stored = {"words": weights(50, 8), "positions": weights(table, 8), "w": weights(8, 4)}
    return model(
        nodes, {"ids": ["n", "l"]}, stored=stored | {"zero": np.array([0])}, dtypes={"ids": np.int64}
    )


@pytest.mark.quick(1)
@pytest.mark.parametrize("length", [24, 77, 512])
def test_an_axis_at_its_largest_size_stays_open(length: int, tmp_path: Path) -> None:
    """It was fixed: a graph of a larger size cannot be inferred."""
    path = save(_text(length), tmp_path)
    ids = np.random.default_rng(0).integers(0, 50, (12, length))
    qtrace.quantize(
        path, ids, tmp_path / "int8.onnx", measure=False, recipe={"placement": "everything"}, progress=False
    )
    assert declared(tmp_path / "int8.onnx") == [["n", "l"], ["n", "l", 4]]
    for size in (length, length - 7, 3):
        (expected,), (got,) = (run_file(p, ids[:3, :size]) for p in (path, tmp_path / "int8.onnx"))
        assert np.square(expected).sum() > 1000 * np.square(expected - got).sum()


@pytest.mark.parametrize(("table", "given", "recorded"), [(64, 24, 24), (24, 21, 7), (24, 24, 4)])
def test_the_recorded_size_is_smaller_only_if_no_larger_one_runs(
    table: int, given: int, recorded: int, tmp_path: Path
) -> None:
    net = qtrace.from_onnx(save(_text(table), tmp_path), {"ids": (1, given)})
    assert net.graph.inputs[1].shape == (1, recorded)


def test_the_windows_of_a_signal_are_no_number(tmp_path: Path) -> None:
    """Their hop is longer than the growth of a map: the same number of windows passed for a fixed one."""
    nodes = [
        node("Conv", "x w", "c", strides=[160]),
        node("Transpose", "c", "t", perm=[2, 0, 1]),
        node("Unsqueeze", "t one", "u"),
        node("Reshape", "u shape", "y"),
    ]
    stored = {"w": weights(4, 1, 400), "one": np.array([1]), "shape": np.array([0, 0, -1])}
    path = save(model(nodes, {"x": ["n", 1, "t"]}, stored=stored), tmp_path)
    net = qtrace.from_onnx(path, {"x": (1, 1, 8000)})
    written = qtrace.export(net, tmp_path / "again.onnx")
    assert declared(written)[0] == ["n", 1, "t"]
    check_sizes(written, net, ((2, 1, 12000), (1, 1, 3000)))


_PAIR = [node("Conv", "a w", "p"), node("Conv", "b w", "q"), node("Sub", "p q", "y")]
_HALF = [
    node("Conv", "a w", "p", strides=[2, 2], pads=[1] * 4),
    node("Conv", "b w", "q", pads=[1] * 4),
    node("Add", "p q", "y"),
]
_THREE = [*_PAIR[:2], node("Sub", "p q", "s"), node("Conv", "c w", "r"), node("Add", "s r", "y")]
_MEAN = [*_THREE[:3], node("ReduceMean", "c", "r", axes=[1, 2, 3], keepdims=1), _THREE[-1]]
_SQUARE = [node("Transpose", "a", "t", perm=[0, 1, 3, 2]), node("Add", "a t", "y")]
_TEXT = [node("Unsqueeze", "b two", "m"), node("Mul", "a m", "y")]
_HALVES = ([(1, 2, 16, 24), (1, 2, 8, 12)], [(2, 2, 10, 36), (2, 2, 5, 18)])
_EQUAL = ([(1, 2, 8, 12)] * 2, [(2, 2, 14, 9)] * 2)
# Nodes, the sizes that each input declares, the shapes to record, and others at which the file runs.
AGREEING = {
    "names": (_PAIR, {"a": "n 2 h w", "b": "n 2 h2 w2"}, *_EQUAL),
    "no names": (_PAIR, {"a": "_ 2 _ _", "b": "_ 2 _ _"}, *_EQUAL),
    "batches": (_PAIR, {"a": "n 2 h w", "b": "m 2 h w"}, *_EQUAL),
    "only batches": (_PAIR, {"a": "n 2 8 8", "b": "m 2 8 8"}, [(1, 2, 8, 8)] * 2, [(3, 2, 8, 8)] * 2),
    "2 to 1": (_HALF, {"a": "n 2 h w", "b": "n 2 h2 w2"}, *_HALVES),
    "2 to 1 without names": (_HALF, {"a": "_ 2 _ _", "b": "_ 2 _ _"}, *_HALVES),
    "three": (
        _THREE, {name: f"n 2 h{name} w{name}" for name in "abc"}, [(1, 2, 8, 8)] * 3, [(2, 2, 14, 9)] * 3
    ),
    "one beside": (
        _MEAN, {name: f"n 2 h{name} w{name}" for name in "abc"}, [(1, 2, 8, 8)] * 3,
        [(2, 2, 14, 9), (2, 2, 14, 9), (2, 2, 7, 30)],
    ),
    "one input": (_SQUARE, {"a": "n 2 h w"}, [(1, 2, 8, 8)], [(2, 2, 14, 14)]),
    "other places": (_TEXT, {"a": "n s 4", "b": "m t"}, [(2, 8, 4), (2, 8)], [(3, 14, 4), (3, 14)]),
}  # fmt: skip


@each_of("case", AGREEING)
def test_sizes_that_must_agree_stay_open_together(tmp_path: Path, case: str) -> None:
    nodes, declarations, recorded, others = AGREEING[case]
    sizes = {
        name: [None if n == "_" else int(n) if n.isdigit() else n for n in text.split()]
        for name, text in declarations.items()
    }
    path = save(model(nodes, sizes, stored={"w": weights(3, 2, 3, 3), "two": np.array([2])}), tmp_path)
    net = qtrace.from_onnx(path, dict(zip(sizes, recorded, strict=True)))
    record = read_open_axes(net)
    assert record is not None
    assert not record.fixed
    again = qtrace.export(net, tmp_path / "again.onnx")
    feeds = {name: weights(*shape, seed=i) for i, (name, shape) in enumerate(zip(sizes, others, strict=True))}
    expected, written = (
        onnxruntime.InferenceSession(str(p), providers=["CPUExecutionProvider"]).run(None, feeds)[0]
        for p in (path, again)
    )
    np.testing.assert_allclose(written, expected, atol=1e-5)
    np.testing.assert_allclose(net(*map(mge.Tensor, feeds.values())).numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("case", ["names", "2 to 1"])
def test_data_of_several_sizes_that_agree_are_quantized(tmp_path: Path, case: str) -> None:
    nodes, declarations, recorded, others = AGREEING[case]
    sizes = {
        name: [int(n) if n.isdigit() else n for n in text.split()] for name, text in declarations.items()
    }
    path = save(model(nodes, sizes, stored={"w": weights(3, 2, 3, 3)}), tmp_path)
    batches = [tuple(weights(*s, seed=i) for i, s in enumerate(shapes)) for shapes in (recorded, others)]
    net = qtrace.from_onnx(path, dict(zip(sizes, recorded, strict=True)))
    prepared = qtrace.prepare(net, "onnxruntime", samples=batches)
    converted = qtrace.convert(qtrace.calibrate(prepared, batches, progress=False))
    written = qtrace.export(converted, tmp_path / "int8.onnx")
    assert declared(written)[:2] == list(sizes.values())
    assert qtrace.verify(written, converted, batches).passed


def test_a_size_that_no_other_one_helps_is_fixed(tmp_path: Path) -> None:
    nodes = [*_THREE[:3], node("Add", "s k", "y")]
    stored = {"w": weights(3, 2, 3, 3), "k": weights(1, 3, 1, 6)}
    path = save(model(nodes, {"a": ["n", 2, "h", "w"], "b": ["n", 2, "i", "j"]}, stored=stored), tmp_path)
    record = read_open_axes(qtrace.from_onnx(path, {"a": (1, 2, 8, 8), "b": (1, 2, 8, 8)}))
    assert record is not None
    assert {axis.name for axis in record.axes} == {"n", "h", "i"}
    assert {axis.name for axis in record.fixed} == {"w", "j"}

"""Selections in nodes that a graph keeps as they are in an ONNX file: suppressions and what follows them."""

from __future__ import annotations

import itertools
from pathlib import Path

import megengine as mge
import numpy as np
import onnx
import pytest

import qtrace
from qtrace.comparing import selections as replay
from qtrace.comparing.selections import SelectedShares, TapedRun, find_selecting
from qtrace.graph import flatten
from qtrace.graph.types import TracedModule
from qtrace.inspection.explanation import explain
from qtrace.onnxfile.selecting import SelectingFragment, selecting_nodes, split_places
from tests.each import each_of
from tests.importing.onnx.networks import model, node
from tests.selecting_nets import pictures

_NMS = node("NonMaxSuppression", "boxes scores limit overlap least", "kept")
_STORED = {
    "limit": np.array([4], np.int64),
    "overlap": np.array([0.5], np.float32),
    "least": np.array([0.1], np.float32),
    "two": np.array([2]),
    "first": np.array([0]),
    "second": np.array([1]),
}
_PICKED = [
    _NMS,
    node("Gather", "kept two", "column", axis=1),
    node("Squeeze", "column second", "places"),
    node("Squeeze", "boxes first", "rows"),
    node("Gather", "rows places", "picked", axis=0),
]
_BOXES = np.array([[[0, 0, 1, 1], [0, 0, 1.1, 1], [4, 4, 5, 5], [8, 8, 9, 9]]], np.float32)


def _places(table: np.ndarray) -> np.ndarray:
    """The rows of a table that are places."""
    return table[table[:, 0] >= 0]


def _scores(*values: float) -> np.ndarray:
    return np.array([[values]], np.float32)


def test_a_suppression_is_reported_and_replayed_with_what_follows_it() -> None:
    best = [
        node("Squeeze", "scores first", "flat"),
        node("Squeeze", "flat first", "row"),
        node("Gather", "row places", "own", axis=0),
        node("TopK", "own second", "best order", axis=0),
        node("Gather", "picked order", "out", axis=0),
    ]
    sizes = {"boxes": (1, 4, 4), "scores": (1, 1, 4)}
    file = model([*_PICKED, *best], sizes, ("picked", "out", "best"), _STORED)
    assert [own.kind for own in selecting_nodes(file)] == ["NonMaxSuppression", "TopK"]
    fragment = SelectingFragment(file)
    other = fragment.places([_BOXES, _scores(0.5, 0.9, 0.8, 0.0)])
    assert _places(other)[:, :4].tolist() == [[0, 0, 0, 1], [0, 0, 0, 2], [1, 0, 0, -1]]
    picked, out, score = fragment.replay([_BOXES, _scores(0.9, 0.5, 0.1, 0.7)], other).outputs
    np.testing.assert_array_equal(picked, _BOXES[0, [1, 2]])
    np.testing.assert_array_equal(out, _BOXES[0, [1]])
    np.testing.assert_array_equal(score, np.float32([0.5]))  # its score in this run


@each_of(
    ("own", "ranks"),
    [
        (node("ArgMax", "scores", "kept", axis=1, keepdims=0), [[1, 0, 2], [0, 1, 1]]),
        (node("ArgMin", "scores", "kept", axis=-2), [[[2, 2, 0]], [[1, 2, 0]]]),
        (node("NonZero", "scores", "kept"), None),
    ],
)
def test_places_keep_their_form(own: onnx.NodeProto, ranks: object) -> None:
    scores = np.float32([[[1, 9, 0], [5, 7, 2], [0, 0, 8]], [[6, 5, 0], [1, 9, 8], [3, 0, 4]]])
    fragment = SelectingFragment(
        model([own], {"scores": (2, 3, 3)}, ("kept",), {}, dtypes={"kept": np.int64})
    )
    table = fragment.places([scores])
    wanted = np.array(np.nonzero(scores)) if ranks is None else np.array(ranks)
    np.testing.assert_array_equal(fragment.replay([scores], table).outputs[0], wanted)
    np.testing.assert_array_equal(fragment.replay([scores[:, ::-1] * 2 + 1], table).outputs[0], wanted)


def test_what_nothing_reads_selects_nothing() -> None:
    values = node("TopK", "scores second", "best order")
    assert not selecting_nodes(model([values], {"scores": (1, 4)}, ("best",), _STORED))
    order = model([values], {"scores": (1, 4)}, ("order",), _STORED, dtypes={"order": np.int64})
    assert selecting_nodes(order)


def _detector(path: Path) -> TracedModule:
    rng = np.random.default_rng(0)
    weights = {
        name: (rng.normal(size=(o, i, k, k)) * (1.5 / (i * k * k)) ** 0.5).astype(np.float32)
        for name, o, i, k in (("a", 16, 3, 3), ("b", 32, 16, 3), ("box", 4, 32, 1), ("score", 2, 32, 1))
    }
    strided = {"pads": [1, 1, 1, 1], "strides": [2, 2]}
    front = [
        node("Conv", "x a", "y", **strided),
        node("Relu", "y", "y1"),
        node("Conv", "y1 b", "z", **strided),
        node("Relu", "z", "z1"),
        node("Conv", "z1 box", "box_map"),
        node("Conv", "z1 score", "score_map"),
        node("Reshape", "box_map flat4", "box_rows"),
        node("Transpose", "box_rows", "boxes", perm=[0, 2, 1]),
        node("Reshape", "score_map flat2", "score_rows"),
        node("Sigmoid", "score_rows", "scores"),
    ]
    stored = {**_STORED, **weights, "flat4": np.array([0, 4, -1]), "flat2": np.array([0, 2, -1])}
    onnx.save(model([*front, *_PICKED], {"x": (1, 3, 32, 32)}, ("picked",), stored), path)
    return qtrace.from_onnx(path)


def test_a_detector_with_a_suppression_is_judged_by_rows(tmp_path: Path) -> None:
    traced = _detector(tmp_path / "float.onnx")
    assert len(find_selecting(flatten(traced))) == 1
    batches = [pictures(1, seed, 32) for seed in range(4)]
    prepared = qtrace.prepare(traced, {"placement": "fastest"}, samples=batches[:1])
    notes = {note.name: note for note in explain(prepared).annotation.notes}
    assert not any(notes[name].output for name in ("box_map", "score_map"))
    assert all("selection" in notes[name].causes for name in ("boxes", "scores"))
    prepared = qtrace.prepare(traced, {"placement": "everything"})
    (output,) = qtrace.compare(qtrace.calibrate(prepared, batches, progress=False), batches).outputs
    assert output.selected is not None
    assert output.selected > 0.5
    assert output.sqnr_db > 20


def test_rows_of_another_run_are_those_that_float_is_asked_for(tmp_path: Path) -> None:
    traced = flatten(_detector(tmp_path / "float.onnx"))
    image, other = (mge.Tensor(pictures(1, seed, 32)) for seed in range(2))
    taped = TapedRun(traced)
    taped.run(other)
    replay = TapedRun(traced, taped.tape.places)
    rows = replay.run(image).numpy()
    boxes = TapedRun(traced).run_until(next(n for n in _nodes(traced) if n.name == "boxes"), image).numpy()
    np.testing.assert_array_equal(rows, boxes[0, _places(taped.tape.places[0])[:, 3]])
    shares = SelectedShares.of(traced)
    shares.add(replay.tape.shares)
    assert 0 <= shares.worst() < 1


def _nodes(traced: TracedModule) -> list:
    return [n for expr in traced.graph._exprs for n in expr.outputs]


_APART = np.array([[[0, 0, 1, 1], [2, 2, 3, 3], [4, 4, 5, 5], [8, 8, 9, 9]]], np.float32)
_CLASSES = np.random.default_rng(0).normal(size=(1, 4, 3)).astype(np.float32)


def _behind_suppression(kind: str, keepdims: int) -> SelectingFragment:
    """NonMaxSuppression, and a ranking of the classes of the boxes that it keeps."""
    ranking = {
        "ArgMax": node("ArgMax", "pc", "label", axis=1, keepdims=keepdims),
        "TopK": node("TopK", "pc two", "v label", axis=1),
    }[kind]
    nodes = [
        node("NonMaxSuppression", "boxes scores limit overlap least", "kept"),
        node("Gather", "kept two", "column", axis=1),
        node("Squeeze", "column second", "places"),
        node("Squeeze", "class first", "classes"),
        node("Gather", "classes places", "pc", axis=0),
        ranking,
    ]
    shapes = {"boxes": (1, 4, 4), "scores": (1, 1, 4), "class": (1, 4, 3)}
    return SelectingFragment(model(nodes, shapes, ["label"], _STORED, dtypes={"label": np.int64}))


@each_of(("kind", "keepdims", "shape"), [("ArgMax", 0, (4,)), ("ArgMax", 1, (4, 1)), ("TopK", 1, (4, 2))])
def test_a_ranking_behind_a_suppression_takes_the_places_of_another_number_of_boxes(
    kind: str, keepdims: int, shape: tuple[int, ...]
) -> None:
    fragment = _behind_suppression(kind, keepdims)
    rows = ([0.9, 0.8, 0.7, 0.6], [0.9, 0.0, 0.7, 0.0], [0.0] * 4)
    many, few, none = (np.array([[row]], np.float32) for row in rows)
    # onnxruntime's TopK ends the process where there is no row.
    for given, own in itertools.permutations((many, few, none) if kind == "ArgMax" else (many, few), 2):
        places = fragment.places([_APART, given, _CLASSES])
        (label,) = fragment.replay([_APART, own, _CLASSES], places).outputs
        kept = int((given > 0.5).sum())
        assert label.shape == (kept, *shape[1:])
        (expected,) = fragment.replay([_APART, given, _CLASSES], places).outputs
        assert np.array_equal(label, expected)


def test_the_share_is_that_of_the_worst_selection_of_a_node() -> None:
    """Behind a suppression places are counted in its own list, so that they agree whatever it has kept."""
    fragment = _behind_suppression("TopK", 1)
    first, other = (np.array([[row]], np.float32) for row in ([0.9, 0.8, 0, 0], [0, 0, 0.9, 0.8]))
    same = np.repeat(_CLASSES[:, :1], 4, axis=1)
    given = fragment.places([_APART, other, same])
    run = fragment.replay([_APART, first, same], given)
    share = replay._share_of_worst(run.own, given, run.rankings)
    assert (share.right, share.places) == (0, 4)


@pytest.mark.parametrize("largest", [3, 2**40])
def test_lists_of_rows_are_compared_as_sets(largest: int) -> None:
    rng = np.random.default_rng(0)
    mine, others = (rng.choice([-1, 0, 1, largest], (count, 3)) for count in (40, 60))
    sets = [set(map(tuple, rows.tolist())) for rows in (mine, others)]
    share = replay._share_of_rows(mine, others)
    assert (share.right, share.places) == (len(sets[0] & sets[1]), len(sets[0] | sets[1]))
    share = replay._share_of_rows(mine, mine[:0])
    assert (share.right, share.places) == (0, len(sets[0]))
    assert replay._share_of_rows(mine[:0], mine[:0]).places == 0


def test_a_table_is_split_by_selection_with_its_rows_in_order() -> None:
    table = np.random.default_rng(0).integers(-3, 4, (50, 10))
    parts = split_places(table)
    for number in range(-4, 5):
        np.testing.assert_array_equal(parts[number], table[table[:, 0] == number, 1:])


@each_of(
    ("own", "scores", "wrong"),
    [
        (node("TopK", "scores second", "best kept", axis=0), [3.0, 2.999, 0.0], 0),  # within a step of 8 bits
        (node("TopK", "scores second", "best kept", axis=0), [3.0, 2.9, 0.0], 1),
        (node("TopK", "scores second", "best kept", axis=0, largest=0), [0.0, 0.001, 3.0], 0),
        (node("ArgMax", "scores", "kept", axis=0), [3.0, 2.999, 0.0], 0),
        (node("ArgMin", "scores", "kept", axis=0, keepdims=0), [0.0, 0.1, 3.0], 1),
    ],
)
def test_a_ranking_in_a_file_takes_near_scores_for_equal(
    own: onnx.NodeProto, scores: list[float], wrong: int
) -> None:
    file = model([own], {"scores": (3, 1)}, ("kept",), _STORED, dtypes={"kept": np.int64})
    fragment = SelectingFragment(file)
    values = np.array(scores, np.float32)[:, None]
    others = fragment.places([values[[1, 0, 2]]])
    run = fragment.replay([values], others)
    share = replay._share_of_worst(run.own, others, run.rankings)
    assert (share.right, share.places) == (1 - wrong, 1)


def test_rows_behind_a_mask_are_reported_and_replayed() -> None:
    nodes = [
        node("Greater", "scores least", "mask"),
        node("Compress", "rows mask", "picked", axis=0),
    ]
    file = model(nodes, {"scores": (4,), "rows": (4, 2)}, ("picked",), _STORED)
    assert [own.kind for own in selecting_nodes(file)] == ["Compress"]
    fragment = SelectingFragment(file)
    rows = np.arange(8, dtype=np.float32).reshape(4, 2)
    first, other = np.float32([0.5, 0, 0.3, 0]), np.float32([0, 0.2, 0.3, 0.4])
    table = fragment.places([other, rows])
    assert _places(table)[:, 1].tolist() == [1, 2, 3]
    np.testing.assert_array_equal(fragment.replay([first, rows], table).outputs[0], rows[1:])
    share = replay._share_of_worst(fragment.places([first, rows]), table, {})
    assert (share.right, share.places) == (1, 4)


def _selecting_in_a_body(path: Path) -> TracedModule:
    """The best of two rows of scores, chosen in a loop over the rows."""
    body = onnx.helper.make_graph(
        [
            node("Identity", "going", "still"),
            node("Gather", "rows i", "row", axis=1),
            node("TopK", "row second", "best order", axis=1),
        ],
        "body",
        [
            onnx.helper.make_tensor_value_info("i", onnx.TensorProto.INT64, ()),
            onnx.helper.make_tensor_value_info("going", onnx.TensorProto.BOOL, ()),
        ],
        [
            onnx.helper.make_tensor_value_info("still", onnx.TensorProto.BOOL, ()),
            onnx.helper.make_tensor_value_info("best", onnx.TensorProto.FLOAT, None),
            onnx.helper.make_tensor_value_info("order", onnx.TensorProto.INT64, None),
        ],
    )
    nodes = [
        node("Conv", "x w", "map", pads=[1, 1, 1, 1]),
        node("Reshape", "map sizes", "flat"),
        node("Sigmoid", "flat", "rows"),
        node("Loop", "two _", "best order", body=body),
    ]
    weight = np.random.default_rng(0).standard_normal((2, 3, 3, 3)).astype(np.float32)
    stored = {**_STORED, "w": weight, "sizes": np.array([0, 2, -1]), "two": np.array(2)}
    file = model(nodes, {"x": (1, 3, 8, 8)}, ("order",), stored, dtypes={"order": np.int64})
    onnx.save(file, path)
    return qtrace.from_onnx(path)


def test_scores_of_a_selection_in_a_body_stay_in_float(tmp_path: Path) -> None:
    traced = _selecting_in_a_body(tmp_path / "float.onnx")
    batches = [pictures(1, seed, 32)[..., :8, :8] for seed in range(2)]
    prepared = qtrace.prepare(traced, {"placement": "fastest"}, samples=batches)
    notes = {note.name: note for note in explain(prepared).annotation.notes}
    assert "selection" in notes["rows"].causes


def _branch(name: str, *nodes: onnx.NodeProto) -> onnx.GraphProto:
    """A branch of an If that gives the positions ``places``."""
    result = onnx.helper.make_tensor_value_info("places", onnx.TensorProto.INT64, None)
    return onnx.helper.make_graph(list(nodes), name, [], [result])


_NONE_OR_SUPPRESSED = node(
    "If",
    "none",
    "places",
    then_branch=_branch("then", node("Slice", "first first first", "places")),
    else_branch=_branch("else", *_PICKED[:3]),
)


def test_places_in_a_branch_are_replayed_with_the_branch() -> None:
    nodes = [
        _NONE_OR_SUPPRESSED,
        node("Squeeze", "boxes first", "rows"),
        node("Gather", "rows places", "out"),
    ]
    file = model(
        nodes, {"boxes": (1, 4, 4), "scores": (1, 1, 4), "none": ()}, ("out",), _STORED, dtypes={"none": bool}
    )
    fragment = SelectingFragment(file)
    assert [own.kind for own in selecting_nodes(file)] == ["If", "NonMaxSuppression"]
    some, others = _scores(0.9, 0.5, 0.1, 0.7), _scores(0.5, 0.9, 0.8, 0.0)
    taken, left = np.array(False), np.array(True)
    table, nothing = (fragment.places([_BOXES, others, none]) for none in (taken, left))
    for none in (taken, left):
        run = fragment.replay([_BOXES, some, none], table)
        np.testing.assert_array_equal(run.outputs[0], _BOXES[0, [1, 2]])
        assert _places(run.own)[-2:, :4].tolist() == [[1, 0, 0, 0], [1, 0, 0, 3]]
        assert fragment.replay([_BOXES, some, none], nothing).outputs[0].shape == (0, 4)
    assert _places(nothing)[:, :2].tolist() == [[0, 0]]


def test_a_selection_is_judged_behind_the_rows_of_the_other_run() -> None:
    """Its own places are those among as many rows as the other run has picked before."""
    nodes = [
        node("Greater", "scores least", "mask"),
        node("Compress", "scores mask", "picked", axis=0),
        node("Greater", "picked half", "high"),
        node("NonZero", "high", "places"),
        node("ConstantOfShape", "count", "zeros"),
        node("Add", "picked zeros", "sum"),
    ]
    stored = {**_STORED, "half": np.array([0.5], np.float32)}
    dtypes = {"places": np.int64, "count": np.int64}
    file = model(nodes, {"scores": (4,), "count": (1,)}, ("places", "sum"), stored, dtypes=dtypes)
    fragment = SelectingFragment(file)
    first, other = np.float32([0.9, 0, 0.8, 0]), np.float32([0.2, 0.3, 0.9, 0])
    given = fragment.places([other, np.array([3])])
    places, added = fragment.replay([first, np.array([3])], given).outputs
    assert (places.tolist(), added.tolist()) == ([[2]], first[:3].tolist())
    own = _places(fragment.replay([first, np.array([3])], given).own)
    assert own[own[:, 0] == 1, 1].tolist() == [0, 2]


def _counted(path: Path, picks: str) -> TracedModule:
    """Picked rows of a map joined with as many rows of zeros; another node of the graph counts the rows.

    torchvision's pooling of regions is written so: rows are picked, counted, sorted by level and joined.
    """
    rng = np.random.default_rng(1)
    front = [
        node("Conv", "x w", "map", pads=[1, 1, 1, 1]),
        node("Reshape", "map sizes", "flat"),
        node("Transpose", "flat", "rows", perm=[1, 0]),
        node("Split", "rows split", "corners lengths score", axis=1),
        node("Abs", "lengths", "long"),
        node("Add", "corners long", "ends"),
        node("Concat", "corners ends", "flat_boxes", axis=1),
        node("Transpose", "score", "scores_row", perm=[1, 0]),
        node("Unsqueeze", "flat_boxes first", "boxes"),
        node("Unsqueeze", "scores_row first", "scores"),
    ]
    by_size = [
        node("Greater", "scores_row least", "mask"),
        node("NonZero", "mask", "found"),
        node("Gather", "found second", "column", axis=0),
        node("Squeeze", "column first", "places"),
    ]
    by_overlap = [
        node("Shape", "boxes", "all"),
        node("ReduceProd", "all", "elements", keepdims=0),
        node("Equal", "elements zero", "none"),
        _NONE_OR_SUPPRESSED,
    ]
    behind = [
        node("Gather", "flat_boxes places", "picked", axis=0),
        node("Shape", "picked", "shape"),
        node("ConstantOfShape", "shape", "zeros"),
        node("Gather", "picked third", "sizes_of", axis=1),
        node("Greater", "sizes_of least", "large"),
        node("Not", "large", "small"),
        node("NonZero", "large", "at_large"),
        node("NonZero", "small", "at_small"),
        node("Concat", "at_large at_small", "order", axis=1),
        node("Squeeze", "order first", "level_order"),
        node("Gather", "picked level_order", "sorted", axis=0),
        node("Concat", "sorted zeros", "joined", axis=1),
    ]
    stored = {
        **_STORED,
        "limit": np.array([200]),
        "least": np.array([0.0], np.float32),
        "zero": np.array(0),
        "third": np.array(3),
        "sizes": np.array([5, -1]),
        "split": np.array([2, 2, 1]),
        "w": rng.standard_normal((5, 3, 3, 3)).astype(np.float32),
    }
    nodes = [*front, *(by_overlap if picks == "If" else by_size), *behind]
    onnx.save(model(nodes, {"x": (1, 3, 16, 16)}, ("joined",), stored), path)
    return qtrace.from_onnx(path)


@pytest.mark.quick(1)
@pytest.mark.parametrize("picks", ["NonZero", "If"])
def test_rows_that_several_nodes_of_a_file_count_are_compared(picks: str, tmp_path: Path) -> None:
    traced = _counted(tmp_path / "float.onnx", picks)
    batches = [pictures(1, seed, 16) for seed in range(3)]
    prepared = qtrace.prepare(traced, {"placement": "everything", "weight": {"bits": 4}})
    qtrace.calibrate(prepared, batches, progress=False)
    (output,) = qtrace.compare(prepared, batches).outputs
    assert 0 < output.selected < 1
    converted = qtrace.convert(prepared)
    report = qtrace.verify(qtrace.export(converted, tmp_path / "m.onnx"), converted, batches)
    assert 0 < report.selected.worst() < 1

"""Equal scores: sorts and searches may give any order of them, and verify accuses nobody for it."""

from __future__ import annotations

from pathlib import Path

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import qtrace
from qtrace.graph.types import TracedModule
from qtrace.verification.selections import FirstOfEquals, Ranked
from tests.importing.onnx.networks import model, node
from tests.nets import images, net

_SIZE = 4 * 6 * 6
_TAILS = {
    "topk": ([node("TopK", "f k", "v i", largest=0)], ("v", "i")),
    "unsorted": ([node("TopK", "f k", "v i", largest=0, sorted=0)], ("v", "i")),
    "argmin": ([node("ArgMin", "f", "i", axis=1)], ("i",)),
    "gathered": (
        [node("TopK", "f k", "v i", largest=0), node("GatherElements", "z i", "g", axis=1)],
        ("v", "g"),
    ),
}
_BATCHES = [images(2, 3, 8, 8, seed=s) for s in range(2)]


def _exported(tail: str, folder: Path) -> tuple[TracedModule, str]:
    """A convolution whose flattened outputs are ranked; relu makes many of them equal."""
    nodes, outputs = _TAILS[tail]
    front = [node("Conv", "x w", "c"), node("Relu", "c", "r"), node("Flatten", "r", "f")]
    front += [node("Flatten", "c", "z")]
    weight = np.random.default_rng(0).normal(size=(4, 3, 3, 3)).astype(np.float32)
    file = model(
        [*front, *nodes],
        {"x": (2, 3, 8, 8)},
        outputs,
        {"w": weight, "k": np.array([5])},
        dtypes={"i": np.int64},
    )
    onnx.save(file, folder / "float.onnx")
    traced = qtrace.from_onnx(folder / "float.onnx")
    prepared = qtrace.prepare(traced, {"placement": "everything"})
    converted = qtrace.convert(qtrace.calibrate(prepared, _BATCHES, progress=False))
    return converted, str(qtrace.export(converted, folder / "m.onnx"))


def _rank_backwards(path: str) -> str:
    """Writes the file with the last of equal scores first: it ranks the reversed scores."""
    file = onnx.load(path)
    graph = file.graph
    index = next(i for i, n in enumerate(graph.node) if n.op_type in ("TopK", "ArgMax", "ArgMin"))
    ranking = graph.node[index]
    stored = {"start": [-1], "stop": [-_SIZE - 1], "axis": [1], "step": [-1], "last": _SIZE - 1}
    graph.initializer.extend(numpy_helper.from_array(np.array(v), k) for k, v in stored.items())
    reverse = helper.make_node("Slice", [ranking.input[0], "start", "stop", "axis", "step"], ["reversed"])
    back = helper.make_node("Sub", ["last", "turned"], [ranking.output[-1]])
    ranking.input[0], ranking.output[len(ranking.output) - 1] = "reversed", "turned"
    graph.node.insert(index + 1, back)
    graph.node.insert(index, reverse)
    onnx.save(file, path.replace("m.onnx", "backwards.onnx"))
    return path.replace("m.onnx", "backwards.onnx")


@pytest.mark.quick(1)
@pytest.mark.parametrize("tail", _TAILS)
def test_equal_scores_are_no_fault(tail: str, tmp_path: Path) -> None:
    converted, path = _exported(tail, tmp_path)
    report = qtrace.verify(path, converted, _BATCHES)
    assert report.passed, report.summary()
    assert "equal scores" not in report.summary() or tail == "unsorted"
    assert qtrace.bisect(path, converted, _BATCHES) is None
    other = _rank_backwards(path)
    report = qtrace.verify(other, converted, _BATCHES)
    assert report.passed, report.summary()
    assert "ranks equal scores, and their order is the runtime's" in report.summary()
    assert "is not compared in " in report.summary()
    assert " and 0 more" not in report.summary()
    assert report.to_dict()["reordered_ties"]["op_by_op"]
    assert qtrace.bisect(other, converted, _BATCHES) is None


@pytest.mark.quick(1)
@pytest.mark.parametrize("tail", ["argmin", "topk"])
def test_positions_of_other_scores_fail_beside_equal_ones(tail: str, tmp_path: Path) -> None:
    converted, path = _exported(tail, tmp_path)
    file = onnx.load(path)
    ranking = next(n for n in file.graph.node if n.op_type in ("TopK", "ArgMin"))
    if tail == "argmin":
        ranking.op_type = "ArgMax"
    else:
        next(a for a in ranking.attribute if a.name == "largest").i = 1
    onnx.save(file, path)
    report = qtrace.verify(path, converted, _BATCHES)
    assert not report.passed
    assert "output i" in report.summary()
    assert qtrace.bisect(path, converted, _BATCHES) is not None


def test_sorts_of_a_module_with_equal_scores(tmp_path: Path) -> None:
    def forward(self: M.Module, x: mge.Tensor) -> tuple[mge.Tensor, ...]:
        scores = F.flatten(F.relu(self.conv(x)), 1)
        return F.argsort(scores, descending=True), *F.sort(scores), F.argmax(scores * 0.0, axis=1)

    mge.random.seed(0)
    traced = qtrace.trace(net(forward, conv=M.Conv2d(3, 4, 3)), _BATCHES[0], check=False)
    for backend, suffix in (("onnxruntime", ".onnx"), ("megengine", ".mge")):
        prepared = qtrace.prepare(traced, {"placement": "everything", "backend": backend})
        converted = qtrace.convert(qtrace.calibrate(prepared, _BATCHES, progress=False))
        path = qtrace.export(
            converted, tmp_path / f"m{suffix}", format="onnx" if suffix == ".onnx" else backend
        )
        report = qtrace.verify(path, converted, _BATCHES, runtime=backend)
        assert report.passed, report.summary()
        assert not report.reordered
    plain = qtrace.export(traced, tmp_path / "plain.onnx")
    assert qtrace.verify(plain, traced, _BATCHES).passed


def test_the_first_of_equal_scores_is_numpys(tmp_path: Path) -> None:
    scores = np.random.default_rng(0).integers(0, 4, (3, 9)).astype(np.float32)

    def forward(self: M.Module, x: mge.Tensor) -> tuple[mge.Tensor, ...]:
        return (*F.topk(x, 4), F.argsort(x), F.argmax(x, axis=0), F.argmin(x), F.argmax(x, 1, keepdims=True))

    traced = qtrace.trace(net(forward), scores, check=False)
    values, top, order, largest, least, rows = (
        v.numpy() for v in FirstOfEquals(traced).run(mge.Tensor(scores))
    )
    np.testing.assert_array_equal(top, np.argsort(-scores, axis=1, kind="stable")[:, :4])
    np.testing.assert_array_equal(values, np.take_along_axis(scores, top, 1))
    np.testing.assert_array_equal(order, np.argsort(scores, axis=1, kind="stable"))
    np.testing.assert_array_equal(largest, scores.argmax(0))
    np.testing.assert_array_equal(rows, scores.argmax(1)[:, None])
    assert least == scores.argmin()


def test_ranked_positions_are_a_set_within_equal_scores() -> None:
    ranked = Ranked(np.array([[0.5, 2.0, 2.0, -np.inf, -np.inf]]), np.array([[2.0, 2.0, 0.5, -np.inf]]))
    assert ranked.accepts(np.array([[1, 2, 0, 3]]))
    assert ranked.accepts(np.array([[2, 1, 0, 4]]))
    for wrong in ([1, 1, 0, 3], [1, 0, 2, 3], [1, 2, 0, 5], [1, 2, 0]):
        assert not ranked.accepts(np.array([wrong]))

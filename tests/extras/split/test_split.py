"""Cuts of a graph: the parts compose to the original bit for bit, and each is a module of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis
import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest
from hypothesis import strategies as st

import qtrace
from qtrace.errors import GraphError
from qtrace.graph import exprs, flatten, lint, set_parameter, split
from tests.each import each_of
from tests.fuzz.graphs import networks
from tests.graph.counting import count_calls
from tests.nets import ResNet, images, net

X = images(2, 4, 8, 8)


def _assert_equal(a: Any, b: Any) -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            _assert_equal(a[key], b[key])
    elif isinstance(a, (tuple, list)):
        assert type(a) is type(b)
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            _assert_equal(x, y)
    else:
        np.testing.assert_array_equal(a.numpy(), b.numpy())


def _trace(module: M.Module, *inputs: Any) -> Any:
    return qtrace.trace(module, *inputs, check=False)


def _detector(self: Any, x: Any) -> Any:
    c3 = F.relu(self.stem(x))
    c4 = F.relu(self.down(c3))
    up = F.nn.interpolate(c4, size=c3.shape[2:], mode="nearest")
    p3 = c3 + self.lateral(up)
    return {"scores": F.sigmoid(self.scores(p3)), "boxes": [self.boxes(p3), self.boxes(c4)]}


def _build_detector() -> M.Module:
    return net(
        _detector,
        stem=M.Conv2d(4, 6, 3, padding=1),
        down=M.Conv2d(6, 6, 3, 2, 1),
        lateral=M.Conv2d(6, 6, 1),
        scores=M.Conv2d(6, 3, 1),
        boxes=M.Conv2d(6, 4, 1),
    )


def test_backbone_and_head_are_modules_with_named_tensors(tmp_path: Path) -> None:
    traced = _trace(_build_detector(), X)
    c3, c4 = (n.name for e in exprs(flatten(traced)) for n in e.outputs if n.name.startswith("relu"))
    parts = split(traced, at=[(c3, c4)])
    backbone, head = parts
    assert (backbone.inputs, backbone.outputs, head.inputs) == (("x",), (c3, c4), (c3, c4))
    assert (len(parts), parts[0], parts[1:]) == (2, backbone, (head,))
    _assert_equal(parts(mge.Tensor(X)), traced(mge.Tensor(X)))
    features = backbone.module(mge.Tensor(X))
    _assert_equal(head.module(*features), traced(mge.Tensor(X)))  # in the structure of the whole
    # The size of c3 is read in the head, from c3 itself, and so for another batch.
    other = images(3, 4, 12, 12)
    _assert_equal(parts(mge.Tensor(other)), traced(mge.Tensor(other)))
    for part in parts:
        assert lint(part.module) == []
        qtrace.save(part.module, tmp_path / "part.mge")
        assert lint(qtrace.load(tmp_path / "part.mge")) == []
    batches = [tuple(f.numpy() for f in features)]
    for part, data in ((backbone, [X]), (head, batches)):
        converted = qtrace.convert(qtrace.calibrate(qtrace.prepare(part.module), data, progress=False))
        for module in (part.module, converted):
            onnx = pytest.importorskip("onnx").load(str(qtrace.export(module, tmp_path / "part.onnx")))
            assert [i.name for i in onnx.graph.input] == list(part.inputs)


def test_parts_share_nothing_with_the_source() -> None:
    traced = _trace(_build_detector(), X)
    expected = traced(mge.Tensor(X))
    parts = split(traced, at=["relu_out_1"])
    set_parameter(traced, "scores.bias", mge.Parameter(np.ones((1, 3, 1, 1), np.float32)))
    traced.stem.weight[...] = 0.0
    _assert_equal(parts(mge.Tensor(X)), expected)


def test_three_parts_with_a_skip_connection_across_both_cuts() -> None:
    traced = _trace(ResNet(4, (1, 1)), images(1, 3, 16, 16))
    x = mge.Tensor(images(1, 3, 16, 16))
    parts = split(traced, at=["stages_0_0_conv1_out", "stages_0_0_conv2_out"])
    assert parts[0].outputs == ("maxpool_out", "stages_0_0_conv1_out")
    assert parts[2].inputs == ("maxpool_out", "stages_0_0_conv2_out")
    _assert_equal(parts(x), traced(x))
    _assert_equal(split(flatten(traced), at=["stages_0_0_conv2_out"])(x), traced(x))


def _outputs_everywhere(self: Any, d: Any, scale: Any = None) -> Any:
    first = F.relu(d["a"])
    left, right = F.split(first, 2, axis=1)
    last = self.conv(right) * self.gain * scale
    return {"in": d["b"], "early": [first, left], "table": self.gain + 1, "last": last, "again": first}


def test_inputs_outputs_and_structure_are_those_of_the_whole() -> None:
    gain = mge.Parameter(np.float32([2.0]))
    module = net(_outputs_everywhere, conv=M.Conv2d(2, 2, 1), gain=gain)
    d = {"a": X, "b": X[:1]}
    traced = _trace(module, d, np.float32([3.0]))
    parts = split(traced, at=["split_out"])
    arguments = {k: mge.Tensor(v) for k, v in d.items()}
    scale = mge.Tensor(np.float32([3.0]))
    _assert_equal(parts(arguments, scale=scale), traced(arguments, scale=scale))
    assert set(parts.inputs) > set(parts[0].inputs)
    document = parts.interface()
    assert document["parts"][1]["inputs"] == list(parts[1].inputs)
    assert "supported" not in document["parts"][0]
    with pytest.raises(GraphError):
        parts(arguments)


def _in_place(self: Any, x: Any) -> Any:
    y = self.conv(x)
    z = F.relu(y)
    y[:, 1:] = 0.5
    w = F.sigmoid(y)
    w += z
    return w, z, y


def test_a_part_does_not_write_into_the_tensors_of_another() -> None:
    traced = _trace(net(_in_place, conv=M.Conv2d(4, 4, 1)), X)
    x = mge.Tensor(X)
    expected = traced(x)
    for cut in ("conv_out", "setitem_out", "sigmoid_out"):
        parts = split(traced, at=[cut])
        _assert_equal(parts(x), expected)
        for part in parts:
            values = [mge.Tensor(images(2, 4, 8, 8)) for _ in part.inputs]
            before = [value.numpy() for value in values]
            part.module(*values)
            for value, old in zip(values, before, strict=True):
                np.testing.assert_array_equal(value.numpy(), old)


REFUSED = {
    "unknown": (["relu_ou"], "lacks node 'relu_ou': did you mean relu_out"),
    "far": (["zzz"], "lacks node 'zzz': qtrace.graph.table"),
    "input": (["x"], "x is an input of the graph: nothing is before it"),
    "parameter": (["gain"], "gain depends only on parameters, constants and sizes"),
    "module": (["conv"], "conv depends only on parameters"),
    "order": (["relu_out", "conv_out"], "nothing is between the cut at relu_out and that at conv_out"),
    "twice": (["relu_out", "relu_out"], "each once"),
    "end": ([("neg_out", "mul_out")], "nothing follows the cut at neg_out, mul_out: cut before"),
    "none": ([], "at least one cut"),
    "empty": ([()], "at least one cut"),
    "number": ([3], "at least one cut"),
    "text": ("relu_out", r"takes a list of cuts: at=\['relu_out'\]"),
}


@each_of("name", REFUSED)
def test_a_cut_that_is_none_is_refused(name: str) -> None:
    def forward(self: Any, x: Any) -> Any:
        y = F.relu(self.conv(x))
        return -y, y * self.gain

    gain = mge.Parameter(np.float32([2.0]))
    traced = _trace(net(forward, conv=M.Conv2d(4, 4, 1), gain=gain), X)
    at, message = REFUSED[name]
    with pytest.raises(GraphError, match=message):
        split(traced, at=at)


def test_only_float_graphs_are_split() -> None:
    module = net(lambda self, x: F.relu(self.conv(x)), conv=M.Conv2d(4, 4, 1))
    with pytest.raises(GraphError, match="takes a TracedModule, not a Net: trace it by"):
        split(module, at=["conv_out"])
    with pytest.raises(GraphError, match="split the float module, and prepare each part"):
        split(qtrace.prepare(_trace(module, X)), at=["conv_out"])


@hypothesis.settings(max_examples=8, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(networks(), st.data())
def test_random_graphs_are_composed_bit_for_bit(module: M.Module, data: st.DataObject) -> None:
    x = images(2, 3, 6, 6)
    traced = _trace(module, x)
    flat = flatten(traced)
    names = [n.name for e in exprs(flat) for n in e.outputs if n.name.endswith("_out") or "_out_" in n.name]
    cut = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True))
    try:
        parts = split(traced, at=[tuple(cut)])
    except GraphError as error:
        assert "cut" in str(error)  # noqa: PT017 - at the outputs, or at sizes
        return
    _assert_equal(parts(mge.Tensor(x)), traced(mge.Tensor(x)))
    assert all(lint(part.module) == [] for part in parts)


def test_work_is_linear_in_the_exprs() -> None:
    def count(length: int) -> int:
        def forward(self: Any, x: Any) -> Any:
            for _ in range(length):
                x = F.relu(x)
            return x

        traced = _trace(net(forward), X)
        return count_calls(lambda: split(traced, at=["relu_out_9", "relu_out_20"]))

    assert count(120) < 5 * count(30)


def test_a_function_of_the_node_says_the_part() -> None:
    traced = _trace(_build_detector(), X)
    stages = split(
        traced, by=lambda node: "body" if node.name.startswith(("stem", "down", "relu")) else "head"
    )
    assert len(stages) == 2
    _assert_equal(stages(mge.Tensor(X)), traced(mge.Tensor(X)))
    heads = ("scores", "boxes", "sigmoid")
    later = split(traced, by=lambda node: 0 if node.name.startswith(heads) else 1)
    assert len(later) == 2
    _assert_equal(later(mge.Tensor(X)), traced(mge.Tensor(X)))  # part 1 runs first: 0 reads it


def test_parts_of_random_labels_compose() -> None:
    traced = _trace(_build_detector(), X)
    names = [n.name for e in exprs(flatten(traced)) for n in e.outputs]
    for seed in range(8):
        cuts = np.random.default_rng(seed).choice(len(names), 2, replace=False)
        label = {name: sum(int(i > cut) for cut in cuts) for i, name in enumerate(names)}
        parts = split(traced, by=lambda node, label=label: label[node.name])
        _assert_equal(parts(mge.Tensor(X)), traced(mge.Tensor(X)))


def test_parts_that_depend_on_each_other_are_refused() -> None:
    traced = _trace(net(lambda self, x: F.relu(F.sigmoid(F.relu(x)))), X)
    reads = "no part can run first: 'a' reads sigmoid_out of 'b', 'b' reads relu_out of 'a'"
    with pytest.raises(GraphError, match=reads):
        split(traced, by=lambda node: "b" if node.name == "sigmoid_out" else "a")
    with pytest.raises(GraphError, match=r"says \[\] of node 'relu_out', which cannot be a key"):
        split(traced, by=lambda node: [])
    with pytest.raises(GraphError, match="either cuts"):
        split(traced)

"""Types of calls are inferred once for equal calls, and anew for calls that differ."""

from __future__ import annotations

from collections import Counter
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.errors import GraphError
from qtrace.fakequant.following.bn_fold import BnFold
from qtrace.graph import flatten, inference
from qtrace.graph.inference import TypeInference
from qtrace.graph.open_axes import (
    OpenAxes,
    OpenAxis,
    SizedTypes,
    open_shapes,
    read_open_axes,
    write_open_axes,
)
from qtrace.graph.renewal import renew_all, set_input_shapes
from tests.each import each_of
from tests.nets import net

X = np.linspace(-1, 1, 24, dtype="float32").reshape(2, 3, 4)


def _types(forward: Any, **parts: Any) -> dict[str, tuple[tuple[int, ...], Any]]:
    """The inferred shape and dtype of each computed tensor."""
    flat = flatten(qtrace.trace(net(forward, **parts), X, check=False))
    types = TypeInference(flat, anew=True)
    found = {}
    for node in flat.graph.nodes():
        value = types.value(node)
        if isinstance(value, (mge.Tensor, inference.TensorType)):
            found[node.name] = (tuple(map(int, value.shape)), np.dtype(value.dtype))
    return found


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    counted: Counter[str] = Counter()
    call = inference._call

    def count(expr: Any, values: Any) -> Any:
        counted[inference._op_name(expr)] += 1
        return call(expr, values)

    monkeypatch.setattr(inference, "_call", count)
    return counted


def test_equal_calls_are_inferred_once(calls: Counter[str]) -> None:
    def forward(self: Any, x: Any) -> Any:
        for _ in range(20):
            x = F.relu(x) + 1.0
        return x

    found = _types(forward)
    assert calls == {"relu": 1, "__add__": 1}
    assert len(found) == 41
    assert {shape for shape, _ in found.values()} == {(2, 3, 4)}


def test_calls_that_differ_in_an_argument_or_a_type_are_inferred_apart() -> None:
    def forward(self: Any, x: Any) -> Any:
        narrow = F.mean(x, axis=1)
        return (
            F.mean(x, axis=2),
            F.relu(narrow),
            F.relu(x),
            F.mean(x, axis=1, keepdims=True),
            F.concat([x, x], axis=1),
            F.concat([x, x], axis=2),
            F.concat([x, narrow.reshape(2, 1, 4)], axis=1),
            F.argmax(x, axis=2) * 2,
            F.argmax(x, axis=2) * 2.0,
            F.matmul(x, x.transpose(0, 2, 1)),
            F.matmul(x, x, transpose_b=True),
        )

    flat = flatten(qtrace.trace(net(forward), X, check=False))
    nodes = [node for node in flat.graph.nodes() if getattr(node, "shape", None)]
    recorded = {n.name: (tuple(map(int, n.shape)), np.dtype(n.dtype)) for n in nodes}
    found = _types(forward)
    assert set(found) >= {node.name for node in flat.graph.outputs}
    assert {name: found[name] for name in found if name in recorded} == {
        name: recorded[name] for name in found if name in recorded
    }


def test_layers_and_functions_of_a_user_are_inferred_call_by_call(calls: Counter[str]) -> None:
    def forward(self: Any, x: Any) -> Any:
        return self.b(self.a(self.a(x)))

    _types(forward, a=M.Linear(4, 4), b=M.Linear(4, 4))
    assert calls["Linear"] + calls["linear"] == 3


def test_integers_that_are_data_do_not_decide_a_shape() -> None:
    """Vectors of one integer and scalars are computed, not deduced; a mask decides how many rows stay."""

    def forward(self: Any, x: Any) -> Any:
        most = F.max(x, axis=(0, 1, 2), keepdims=True).astype("int32")
        one = most.reshape(1)
        both = F.concat([F.add(one, 1), F.maximum(F.abs(one), F.expand_dims(F.sum(one), 0))])
        return F.flatten(F.minimum(both, 2)), both[0], F.broadcast_to(one, (3,)), F.squeeze(most), x[x > 0]

    types = SizedTypes(flatten(qtrace.trace(net(forward), X, check=False)))
    found = types.infer({"x": (4, 3, 4)})
    *known, chosen = [found[node] for node in types.traced.graph.outputs]
    assert [kind and kind.shape for kind in known] == [(2,), (), (3,), ()]
    assert chosen is None


def _with_open_axes(forward: Any, *axes: int) -> Any:
    flat = flatten(qtrace.trace(net(forward), X[:1], check=False))
    write_open_axes(flat, OpenAxes(tuple(OpenAxis("x", axis, f"size {axis}", "NCH"[axis]) for axis in axes)))
    return flat


def test_two_sizes_are_inferred_where_only_the_batch_is_open() -> None:
    for axes, count in (((0,), 2), ((0, 1), 3), ((2,), 3)):
        flat = _with_open_axes(lambda self, x: F.relu(x), *axes)
        assert len(SizedTypes(flat).at_other_sizes(read_open_axes(flat).axes)) == count


@each_of("cut", [2, 3, 4, 8])
def test_a_batch_that_is_cut_has_not_the_name_of_the_batch(cut: int) -> None:
    flat = _with_open_axes(lambda self, x: (F.relu(x), x[:cut]), 0)
    whole, part = (node.name for node in flat.graph.outputs)
    assert open_shapes(flat)[whole] == ("N", 3, 4)
    assert open_shapes(flat)[part] == (-1, 3, 4)


@pytest.mark.parametrize("shape", [(-1, 4, 1), (2, 2, 8)])
def test_a_detached_tensor_has_a_type_for_what_reads_it(shape: tuple[int, ...]) -> None:
    module = net(lambda self, x: F.reshape(self.fc(x).detach(), shape) * 2, fc=M.Linear(8, 8))
    flat = flatten(qtrace.trace(module, np.zeros((4, 8), np.float32), check=False))
    renew_all(flat)
    (result,) = flat.graph.outputs
    assert tuple(result.shape) == tuple(module(mge.Tensor(np.zeros((4, 8), np.float32))).shape)


@pytest.mark.parametrize("size", [24, 16])
def test_the_shapes_behind_a_norm_that_trains_are_known_at_another_size(size: int) -> None:
    """Gptq read none behind a BatchNorm that a layer did not take in, and ended in a TypeError."""
    layers = {
        "a": M.Conv2d(3, 8, 3, padding=1),
        "an": M.BatchNorm2d(8),
        "b": M.ConvTranspose2d(8, 8, 2, stride=2),
        "bn": M.BatchNorm2d(8),
        "c": M.Linear(8, 6),
        "cn": M.BatchNorm1d(6),
    }

    def forward(self: Any, x: Any) -> Any:
        y = F.relu(self.an(self.a(x)))
        return F.relu(self.bn(self.b(y))), F.relu(self.cn(self.c(y.mean(axis=(2, 3)))))

    module = net(forward, **layers)
    module.eval()
    traced = qtrace.trace(module, np.ones((1, 3, 16, 16), np.float32), check=False)
    prepared = qtrace.prepare(traced, {"backend": "generic", "ptq": []})
    assert sum(isinstance(module, BnFold) for module in prepared.modules()) == 3
    set_input_shapes(prepared, {"x": (1, 3, size, size)})
    assert [tuple(node.shape) for node in prepared.graph.outputs] == [(1, 8, 2 * size, 2 * size), (1, 6)]
    assert not [n.name for e in prepared.graph._exprs for n in e.outputs if getattr(n, "shape", 0) is None]
    with pytest.raises(GraphError, match=r"a_out_bn|an_out"):
        set_input_shapes(prepared, {"x": (1, 4, size, size)})

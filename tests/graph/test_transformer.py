"""A Transformer rebuilds a graph op by op; a hook rewrites, drops or adds ops; linear in the graph."""

from __future__ import annotations

from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.errors import GraphError
from qtrace.graph import GraphBuilder, Transformer, exprs, lint
from qtrace.graph.notes import source_line
from qtrace.graph.walk import op_label
from tests.graph.counting import count_calls
from tests.nets import MobileNetV2, ResNet, images, net

X = images(2, 4, 8, 8)


def _ops(traced: Any) -> list[str]:
    return [op_label(e) for e in exprs(traced) if op_label(e) != "getattr"]


@pytest.mark.parametrize(
    "module", [ResNet(4, (1, 1)), MobileNetV2(0.25, blocks=(1, 2, 1))], ids=["resnet", "mobilenet"]
)
def test_without_hooks_the_graph_is_the_same(module: M.Module) -> None:
    x = images(1, 3, 32, 32)
    traced = qtrace.trace(module, x, check=False)
    new = Transformer(traced).run()
    assert lint(new) == []
    assert _ops(new) == _ops(qtrace.graph.flatten(traced))
    assert {n for n, _ in new.named_parameters()} == {n for n, _ in traced.named_parameters()}
    np.testing.assert_array_equal(new(mge.Tensor(x)).numpy(), traced(mge.Tensor(x)).numpy())


def _everything(self: Any, d: Any, scale: Any) -> Any:
    y = self.conv(d["a"])
    left, right = F.split(y, 2, axis=1)
    size = d["a"].shape[0]
    table = mge.Tensor(np.arange(8, dtype=np.float32))
    left += scale
    return {
        "left": [left * self.gain, right.reshape(size, -1)],
        "right": table * F.max(y),
        "row": self.conv.bias,
    }


def test_structures_methods_kernels_and_constants_are_kept() -> None:
    gain = mge.Parameter(np.ones((1, 2, 1, 1), np.float32))
    module = net(_everything, conv=M.Conv2d(4, 4, 3), gain=gain, buffer=mge.Tensor(np.ones(3, np.float32)))
    scale = np.float32([2.0])
    traced = qtrace.trace(module, {"a": X}, scale, check=False)
    new = Transformer(traced).run()
    assert lint(new) == []
    for batch in (X, X[:1]):
        expected = traced({"a": mge.Tensor(batch)}, scale=mge.Tensor(scale))
        result = new({"a": mge.Tensor(batch)}, scale=mge.Tensor(scale))
        np.testing.assert_array_equal(result["left"][0].numpy(), expected["left"][0].numpy())
        np.testing.assert_array_equal(result["left"][1].numpy(), expected["left"][1].numpy())
        np.testing.assert_array_equal(result["right"].numpy(), expected["right"].numpy())
    assert isinstance(new.gain, mge.Parameter)
    assert not hasattr(new, "buffer")


class _Rewrite(Transformer):
    def call_function(self, function: Any, args: Any, kwargs: Any) -> Any:
        if function is F.silu:  # two ops for one
            return self.builder.call_function(F.mul, args[0], self.builder.call_function(F.sigmoid, args[0]))
        return super().call_function(function, args, kwargs)

    def call_method(self, method: str, args: Any, kwargs: Any) -> Any:
        return args[0] if method == "__mul__" else super().call_method(method, args, kwargs)

    def call_module(self, path: str, module: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(module, M.ReLU):
            return self.builder.call_module(f"{path}_leaky", M.LeakyReLU(0.5), *args)
        return super().call_module(path, module, args, kwargs)


def test_hooks_replace_drop_and_add_ops_under_the_old_names() -> None:
    module = net(lambda self, x: F.silu(self.act(self.conv(x) * 1.0)), conv=M.Conv2d(4, 4, 1), act=M.ReLU())
    traced = qtrace.trace(module, X, check=False)
    new = _Rewrite(traced).run()
    assert lint(new) == []
    assert _ops(new) == ["Conv2d", "LeakyReLU", "F.sigmoid", "F.mul"]
    assert [n.name for n in new.graph.outputs] == ["silu_out"]
    assert "act_out" in {n.name for e in exprs(new) for n in e.outputs}
    expected = F.silu(F.leaky_relu(traced.conv(mge.Tensor(X)), 0.5)).numpy()
    np.testing.assert_allclose(new(mge.Tensor(X)).numpy(), expected, rtol=1e-5, atol=1e-6)
    lines = {source_line(e) for e in exprs(new) if op_label(e) in ("F.sigmoid", "F.mul")}
    assert len(lines) == 1
    assert "test_transformer.py" in lines.pop()


@pytest.mark.parametrize("returned", [None, "text", (), 3.0])
def test_a_hook_that_returns_no_node_is_refused(returned: Any) -> None:
    class Wrong(Transformer):
        def call_function(self, function: Any, args: Any, kwargs: Any) -> Any:
            return returned

    traced = qtrace.trace(net(lambda self, x: F.exp(x)), X, check=False)
    with pytest.raises(GraphError, match=r"the hook for exp_out.*return one node for each of its 1 results"):
        Wrong(traced).run()


def test_an_op_that_fails_on_its_new_inputs_is_named() -> None:
    class Wrong(Transformer):
        def call_function(self, function: Any, args: Any, kwargs: Any) -> Any:
            return self.builder.call_function(F.matmul, args[0], args[0])

    traced = qtrace.trace(net(lambda self, x: F.exp(x)), images(2, 3, 4, 5), check=False)
    with pytest.raises(GraphError, match="F.matmul fails on x"):
        Wrong(traced).run()


def test_only_a_traced_module_is_taken() -> None:
    with pytest.raises(GraphError, match="a Transformer takes a TracedModule, not a ReLU"):
        Transformer(M.ReLU())  # type: ignore[arg-type]


def test_the_work_grows_in_step_with_the_graph() -> None:
    def chain(length: int) -> Any:
        builder = GraphBuilder()
        y = builder.input("x", (1, 2))
        for index in range(length):
            y = builder.call_function(F.add, y, builder.parameter(f"p{index}", np.zeros(2, np.float32)))
        return builder.finish(y)

    short, long = chain(40), chain(160)
    assert count_calls(lambda: Transformer(long).run()) < 5 * count_calls(lambda: Transformer(short).run())

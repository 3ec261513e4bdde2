"""The flat copy: same values as the source, same names as MegEngine's own flatten, nothing shared, linear."""

from __future__ import annotations

import megengine as mge
import megengine.functional as F
import megengine.module as M
import megengine.traced_module as tm
import numpy as np
import pytest
from megengine.traced_module.node import TensorNode

import qtrace
from qtrace.graph.flatten import flatten
from qtrace.graph.lint import lint
from tests.nets import Chain, MobileNetV2, ResNet, images, net, randomize


def _twice() -> M.Module:
    return net(
        lambda self, x: self.head(F.relu(self.head(x))) + self.head(x),
        head=M.Sequential(M.Conv2d(4, 4, 1), M.ReLU()),
    )


NETS = {
    "resnet": (lambda: randomize(ResNet(4, (1, 1))), (3, 32, 32)),
    "mobilenet": (lambda: randomize(MobileNetV2(0.25, blocks=(1, 2, 1))), (3, 32, 32)),
    "twice": (_twice, (4, 6, 6)),
    "dict": (lambda: net(lambda self, x: {"a": [self.c(x), x], "b": x + 1}, c=M.Conv2d(4, 2, 1)), (4, 6, 6)),
    "tensor_attribute": (
        lambda: net(lambda self, x: x * self.gain, gain=mge.Parameter(np.ones((1, 4, 1, 1), np.float32))),
        (4, 6, 6),
    ),
}


def _leaves(value: object) -> list[np.ndarray]:
    if isinstance(value, dict):
        return [leaf for k in sorted(value) for leaf in _leaves(value[k])]
    if isinstance(value, (list, tuple)):
        return [leaf for v in value for leaf in _leaves(v)]
    return [value.numpy()]


@pytest.mark.parametrize("name", NETS)
def test_flat_copy_equals_the_source_and_megengines_flatten(name: str) -> None:
    make, shape = NETS[name]
    x = mge.Tensor(images(2, *shape))
    traced = tm.trace_module(make(), x)
    flat, native = flatten(traced), traced.flatten()
    assert lint(flat) == []
    for output, expected in zip(_leaves(flat(x)), _leaves(traced(x)), strict=True):
        np.testing.assert_array_equal(output, expected)
    assert len(flat.graph._exprs) == len(native.graph._exprs)
    assert list(flat.state_dict()) == list(native.state_dict())
    assert {n for n, _ in flat.named_parameters()} == {n for n, _ in traced.named_parameters()}
    again = flatten(flat)
    np.testing.assert_array_equal(_leaves(again(x))[0], _leaves(flat(x))[0])
    assert [e.outputs[0].name for e in again.graph._exprs] == [e.outputs[0].name for e in flat.graph._exprs]


def test_nothing_is_shared_with_the_source() -> None:
    x = mge.Tensor(images(2, 3, 32, 32))
    traced = tm.trace_module(randomize(ResNet(4, (1, 1))), x)
    before = traced(x).numpy()
    flat = flatten(traced)
    for tensor in (*flat.parameters(), *flat.buffers()):
        tensor[...] = tensor + 1.0
    np.testing.assert_array_equal(traced(x).numpy(), before)
    assert np.abs(flat(x).numpy() - before).max() > 0


def test_tied_parameters_stay_tied() -> None:
    shared = M.Conv2d(4, 4, 1)
    module = net(lambda self, x: self.a(x) + self.b(x), a=shared, b=shared)
    flat = flatten(tm.trace_module(module, mge.Tensor(images(1, 4, 4, 4))))
    assert flat.a.weight is flat.b.weight


def test_long_chains_flatten_without_recursion() -> None:
    x = mge.Tensor(np.zeros((1, 1, 2, 2), np.float32))
    traced = tm.trace_module(randomize(Chain(250, 1)), x)
    flat = flatten(traced)
    assert len(flat.graph._exprs) == 2 * 3 * 250


class _Up(M.Module):
    """Enlarges, then adds a border: the second call gets what the first one made."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = M.Conv2d(3, 3, 1)

    def forward(self, x):
        y = F.vision.interpolate(self.conv(x), scale_factor=2)
        return F.relu(y.reshape(y.shape[0], -1, y.shape[3])).reshape(y.shape)


def test_a_module_called_with_other_sizes_has_the_shapes_of_each_call():
    model = net(lambda self, x: self.head(self.up(self.up(x))), up=_Up(), head=M.Conv2d(3, 2, 1))
    x = mge.Tensor(images(2, 3, 4, 6))
    flat = flatten(qtrace.trace(model, x, check=False))
    shapes = []

    class Shapes(qtrace.graph.Interpreter):
        def on_node(self, node, value):
            if isinstance(node, TensorNode):
                shapes.append(
                    (node.name, tuple(int(n) for n in node.shape), tuple(int(n) for n in value.shape))
                )
            return value

    Shapes(flat).run(x)
    assert [s for s in shapes if s[1] != s[2]] == []
    assert {s[1] for s in shapes} >= {(2, 3, 8, 12), (2, 3, 16, 24), (2, 48, 24)}
    macs = {
        n.name: n.macs
        for n in qtrace.explain(qtrace.prepare(qtrace.trace(model, x, check=False))).annotation.notes
    }
    assert macs["up_conv_out_1"] == 4 * macs["up_conv_out"] > 0


def _recorded(flat: tm.TracedModule) -> dict[str, tuple[int, ...] | None]:
    nodes = (n for e in flat.graph._exprs for n in e.outputs if isinstance(n, TensorNode))
    return {n.name: None if n.shape is None else tuple(int(i) for i in n.shape) for n in nodes}


def test_a_shape_that_depends_on_values_is_that_of_no_other_call() -> None:
    """It is unknown, and what is computed from it as well; the rest of the call is known."""

    def forward(self, x):
        y = self.conv(x)
        mask = y > 0
        selected = F.cond_take(mask, y)[0]
        return F.where(mask, y, y * 0.5) + F.exp(selected * 2).sum()

    def twice(self, x):
        return self.block(x), self.block(F.max_pool2d(x, 2))

    block = net(forward, conv=M.Conv2d(3, 3, 1))
    shapes = _recorded(
        flatten(qtrace.trace(net(twice, block=block), mge.Tensor(images(2, 3, 8, 6)), check=False))
    )
    assert shapes["block_gt_out_1"] == shapes["block_where_out_1"] == shapes["block_1_out"] == (2, 3, 4, 3)
    assert len(shapes["block_cond_take_out"]) == len(shapes["block_exp_out"]) == 1
    assert shapes["block_cond_take_out_2"] is shapes["block_exp_out_1"] is None


def test_integers_that_are_sizes_are_computed() -> None:
    def up(self, x, size):
        return F.vision.interpolate(self.conv(x), size=size)

    def twice(self, x):
        large = F.concat([x, x], axis=2)
        return self.up(x, x.shape[2:]) + 1, self.up(x, large.shape[2:]) + 1

    model = net(twice, up=net(up, conv=M.Conv2d(3, 3, 1)))
    shapes = _recorded(flatten(qtrace.trace(model, mge.Tensor(images(2, 3, 8, 6)), check=False)))
    assert shapes["up_out"] == (2, 3, 8, 6)
    assert shapes["up_1_out"] == (2, 3, 16, 6)


def test_a_module_in_training_keeps_its_statistics_while_shapes_are_read() -> None:
    block = net(lambda self, x: self.bn(self.conv(x)), conv=M.Conv2d(3, 3, 1), bn=M.BatchNorm2d(3))
    model = net(lambda self, x: (self.block(x), self.block(F.max_pool2d(x, 2))), block=block)
    traced = tm.trace_module(model, mge.Tensor(images(2, 3, 8, 6)))
    traced.train()
    before = traced.block.bn.running_mean.numpy().copy()
    flat = flatten(traced)
    assert flat.block.bn.training
    np.testing.assert_array_equal(flat.block.bn.running_mean.numpy(), before)
    assert _recorded(flat)["block_conv_out_1"] == (2, 3, 4, 3)

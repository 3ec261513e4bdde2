"""Which tensors are scaled together, and why others are not."""

from __future__ import annotations

from collections.abc import Callable

import megengine.functional as F
import megengine.module as M
import numpy as np

from qtrace.graph.flatten import flatten
from qtrace.graph.tracing.trace import trace
from qtrace.preparation.passes.expand import expand
from qtrace.ptq.layers.scaling import channel_groups
from tests.each import each_of
from tests.nets import images, net


def _groups(forward: Callable[..., object], size: int = 8, **children: object) -> list:
    flat = flatten(trace(net(forward, **children), images(2, 4, size, size), check=False))
    expand(flat)
    return channel_groups(flat)


def _conv(groups: int = 1) -> M.Conv2d:
    return M.Conv2d(4, 4, 3, padding=1, groups=groups)


THROUGH = {
    "relu": F.relu,
    "leaky": lambda x: F.leaky_relu(x, 0.1),
    "max pool": lambda x: F.max_pool2d(x, 2),
    "average pool": lambda x: F.avg_pool2d(x, 2),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x, 2),
    "by a number": lambda x: x * 0.5,
    "resize": lambda x: F.vision.interpolate(x, scale_factor=2.0, mode="bilinear"),
    "zeros around": lambda x: F.nn.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1))),
}


@each_of("name", THROUGH)
def test_a_tensor_between_two_layers_is_a_group(name: str) -> None:
    (group,) = _groups(lambda self, x: self.b(THROUGH[name](self.a(x))), a=_conv(), b=_conv())
    assert (group.reason, group.channels, len(group.writers), len(group.readers)) == ("", 4, 1, 1)


STAY = {
    "sigmoid": (lambda self, x: self.b(F.sigmoid(self.a(x))), "sigmoid (sigmoid_out) does not scale"),
    "relu6": (lambda self, x: self.b(F.relu6(self.a(x))), "relu6 (relu6_out) does not scale"),
    "added number": (lambda self, x: self.b(self.a(x) + 1.0), "add (add_out) does not scale"),
    "one over": (lambda self, x: self.b(1.0 / self.a(x)), "div (rtruediv_out) does not scale"),
    "product": (lambda self, x: self.b(self.a(x) * F.relu(self.a2(x))), "mul (mul_out) does not scale"),
    "over channels": (lambda self, x: self.b(self.a(x) - F.mean(self.a2(x), 1, True)), "sub (sub_out)"),
    "joined": (lambda self, x: self.b(F.concat([self.a(x)[:, :2], self.a2(x)[:, 2:]], 1)), "concat"),
    "flattened": (lambda self, x: self.c(F.flatten(self.a(x), 1)), "flatten (flatten_out)"),
    "with the input": (lambda self, x: self.b(self.a(x) + x), "it is an input of the model"),
}


@each_of("name", STAY)
def test_what_does_not_scale_is_left_with_the_reason(name: str) -> None:
    forward, reason = STAY[name]
    flat = flatten(
        trace(
            net(forward, a=_conv(), a2=_conv(), b=_conv(), c=M.Linear(256, 3)),
            images(2, 4, 8, 8),
            check=False,
        )
    )
    expand(flat)
    assert [g for g in channel_groups(flat) if not g.reason] == []
    reasons = {node.reason for node in channel_groups(flat, every=True)}
    assert any(reason in text for text in reasons), reasons


def test_what_leaves_the_model_and_a_shared_layer_stay() -> None:
    def forward(self: M.Module, x: object) -> object:
        y = F.relu(self.a(x))
        return y, self.b(y)

    assert _groups(forward, a=_conv(), b=_conv())[0].reason == "it leaves the model"
    shared = _groups(lambda self, x: self.b(F.relu(self.b(self.a(x)))), a=_conv(), b=_conv())
    assert [g for g in shared if not g.reason] == []


def test_residual_branches_are_one_group_with_every_writer_and_reader() -> None:
    def forward(self: M.Module, x: object) -> object:
        y = F.relu(self.a(x))
        z = F.relu(y + self.c(F.relu(self.b(y))))
        return self.d(F.flatten(F.adaptive_avg_pool2d(z, 1), 1))

    groups = _groups(forward, a=_conv(), b=_conv(), c=_conv(), d=M.Linear(4, 3))
    sides = {(tuple(c.out.name for c in g.writers), tuple(c.out.name for c in g.readers)) for g in groups}
    assert sides == {(("a_out", "c_out"), ("b_out", "d_out")), (("b_out",), ("c_out",))}
    assert all(not g.reason for g in groups)


def test_random_shapes_keep_their_channels() -> None:
    rng = np.random.default_rng(0)
    for channels in rng.integers(2, 9, 3):
        c = int(channels)
        layers = {"a": M.Conv2d(4, c, 1), "b": M.Conv2d(c, c, 3, groups=c), "d": M.ConvTranspose2d(c, 3, 2)}
        groups = _groups(lambda self, x: self.d(F.relu(self.b(F.relu(self.a(x))))), **layers)
        assert [g.channels for g in groups] == [c, c]

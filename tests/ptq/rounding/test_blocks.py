"""Blocks by structure: what lies between tensors that are alive alone."""

from __future__ import annotations

import itertools
from typing import Any

import megengine.functional as F
import megengine.module as M
import numpy as np

import qtrace
from qtrace import QConfig
from qtrace.preparation.phases import has_wrong_gradient
from qtrace.ptq.layers.quantized import quantized_layers
from qtrace.ptq.rounding.block_run import single_layers, structural_blocks
from tests.nets import MobileNetV2, ResNet, images, net, randomize


def _prepared(module: M.Module, *shape: int) -> Any:
    return qtrace.prepare(qtrace.trace(randomize(module), images(*shape), check=False), QConfig())


def _names(blocks: list[Any]) -> list[tuple[str, ...]]:
    return [tuple(layer.name for layer in b.layers) for b in blocks]


def test_residual_blocks_are_blocks_and_layers_of_a_chain_are_too() -> None:
    model = _prepared(ResNet(width=4, blocks=(1, 1)), 1, 3, 32, 32)
    blocks = structural_blocks(model, quantized_layers(model)[0], 12)
    assert _names(blocks) == [
        ("conv1_out",),
        ("stages_0_0_conv1_out", "stages_0_0_conv2_out"),
        ("stages_1_0_conv1_out", "stages_1_0_conv2_out", "stages_1_0_shortcut__0_out"),
        ("fc_out",),
    ]
    for one, other in itertools.pairwise(blocks):
        assert [n.name for n in one.exits] == [n.name for n in other.entries]
    assert all(len(b.entries) == len(b.exits) == 1 for b in blocks)


def test_inverted_bottlenecks_with_a_way_around_are_blocks() -> None:
    module = MobileNetV2(0.25, blocks=(1, 3, 3))
    around = sum(getattr(m, "add", False) for m in module.modules())
    model = _prepared(module, 1, 3, 32, 32)
    sizes = [len(b.layers) for b in structural_blocks(model, quantized_layers(model)[0], 12)]
    assert sizes.count(3) == around > 3
    assert set(sizes) == {1, 3}


def test_a_block_that_is_too_large_is_taken_layer_by_layer_in_order() -> None:
    model = _prepared(ResNet(width=4, blocks=(1, 1)), 1, 3, 32, 32)
    layers, _ = quantized_layers(model)
    blocks = structural_blocks(model, layers, 2)
    assert [len(b.layers) for b in blocks] == [1, 2, 1, 1, 1, 1]
    assert [b.layers[0].name for b in single_layers(model, layers)] == [layer.name for layer in layers]


def test_several_outputs_are_the_exits_of_the_last_block() -> None:
    def forward(self: M.Module, x: object) -> object:
        y = F.relu(self.a(x))
        return self.b(y), self.c(y)

    module = net(forward, a=M.Conv2d(4, 4, 3), b=M.Conv2d(4, 2, 1), c=M.Conv2d(4, 3, 1))
    model = _prepared(module, 1, 4, 8, 8)
    blocks = structural_blocks(model, quantized_layers(model)[0], 12)
    assert [len(b.exits) for b in blocks] == [1, 2]


def test_a_layer_takes_the_activation_behind_it() -> None:
    module = net(lambda self, x: self.b(F.relu(self.a(x))), a=M.Conv2d(4, 4, 3), b=M.Conv2d(4, 2, 1))
    model = _prepared(module, 1, 4, 8, 8)
    blocks = single_layers(model, quantized_layers(model)[0])
    assert [[n.name for n in b.exits] for b in blocks] == [["relu_out"], ["b_out"]]


def test_no_block_of_learned_rounding_holds_a_layer_with_a_wrong_gradient() -> None:
    layers = {"cell": M.LSTM(4, 6, proj_size=3), "g": M.Linear(4, 4), "h": M.Linear(6, 4)}
    module = net(lambda self, x: x + self.h(self.cell(self.g(x))[0]), **layers)
    x = np.ones((3, 2, 4), np.float32)
    prepared = qtrace.prepare(qtrace.trace(module, x, check=False), {"ptq": [], "placement": "everything"})
    blocks = structural_blocks(prepared, quantized_layers(prepared)[0], 8)
    assert [len(block.layers) for block in blocks] == [1, 1]
    assert not any(has_wrong_gradient(expr) for block in blocks for expr in block.exprs)

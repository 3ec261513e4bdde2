"""The shapes that nodes record are those of the values, after every pass: exporters and rules read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.graph import Interpreter
from qtrace.graph.types import Node, TensorNode, TracedModule
from tests.nets import MobileNetV2, ResNet, images, net, randomize
from tests.zoo.detectors.dense import RetinaNet
from tests.zoo.detectors.entry import trained
from tests.zoo.detectors.yolo import Yolox
from tests.zoo.transformers.swin import Swin

NETWORKS: dict[str, tuple[Callable[[], M.Module], int]] = {
    "resnet": (lambda: randomize(ResNet(4, (1, 1))), 32),
    "mobilenet": (lambda: randomize(MobileNetV2(0.25, blocks=(1, 2, 1))), 32),
    "padded": (
        lambda: net(
            lambda self, x: self.fc(F.flatten(self.conv(x), 1)),
            conv=M.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"),
            fc=M.Linear(256, 5),
        ),
        8,
    ),
    "yolox": (lambda: trained(Yolox(width=4)), 32),
    "yolox with boxes": (lambda: trained(Yolox(infer=True, width=4)), 32),
    "retinanet": (lambda: trained(RetinaNet()), 64),
    "swin": (lambda: trained(Swin()), 32),
}
SLOW = {"yolox", "yolox with boxes", "retinanet", "swin"}


def _wrong_shapes(traced: TracedModule, x: np.ndarray) -> list[Any]:
    wrong: list[Any] = []

    class Shapes(Interpreter):
        def on_node(self, node: Node, value: Any) -> Any:
            if isinstance(node, TensorNode):
                recorded = None if node.shape is None else tuple(int(n) for n in node.shape)
                if recorded != tuple(int(n) for n in value.shape):
                    wrong.append((node.name, recorded, value.shape))
            return value

    Shapes(traced).run(mge.Tensor(x))
    return wrong


@pytest.mark.quick(1)
@pytest.mark.usefixtures("synchronous")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in NETWORKS]
)
def test_recorded_shapes_are_those_of_values(name: str) -> None:
    build, size = NETWORKS[name]
    x = images(2, 3, size, size)
    prepared = qtrace.prepare(qtrace.trace(build(), x, check=False))
    assert _wrong_shapes(prepared, x) == []
    converted = qtrace.convert(qtrace.calibrate(prepared, [x], progress=False))
    assert _wrong_shapes(converted, x) == []

"""The networks that every exported form is verified on, and the results of their files in the runtimes.

``scripts/verify_networks.py`` prints the table; the slow tests hold it to the targets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np

import qtrace
from qtrace.graph.types import TracedModule
from qtrace.verification.report import VerifyReport
from tests.nets import MobileNetV2, images
from tests.zoo import efficientnet, mobilenet, regnet, repvgg, shufflenet
from tests.zoo.checks import rounded_to_nearest
from tests.zoo.detectors.dense import RetinaNet
from tests.zoo.detectors.entry import bounded, trained
from tests.zoo.detectors.yolo import Yolox
from tests.zoo.parts import conv_bn, settle
from tests.zoo.resnet import Basic, Bottleneck

__all__ = ["NETWORKS", "RUNTIMES", "Network", "Prepared", "Result", "measure"]

Batch = np.ndarray
# Which ops the share of integer kernels counts: convolutions, linear layers, sums, joins and pooling.
COUNTED = [
    "Conv",
    "ConvTranspose",
    "Gemm",
    "MatMul",
    "Add",
    "Concat",
    "AveragePool",
    "GlobalAveragePool",
    "MaxPool",
    "ReduceMean",
]
# Form of the file -> the recipe of its target, imported before the family's.
TARGETS = {
    "onnx": "backend/onnxruntime",
    "tflite": "backend/tflite",
    "ncnn": "backend/ncnn",
    "mge": "backend/megengine",
}
RUNTIMES = {"onnxruntime": "onnx", "openvino": "onnx", "litert": "tflite", "ncnn": "ncnn", "megengine": "mge"}


class FourStages(M.Module):
    """ResNet as published: a 7x7 stem, four stages, a classifier."""

    def __init__(self, block: type[M.Module], counts: tuple[int, ...], width: int, classes: int) -> None:
        super().__init__()
        self.stem, self.pool = conv_bn(3, width, 7, 2), M.MaxPool2d(3, 2, 1)
        layers, inside = [], width
        for stage, count in enumerate(counts):
            for number in range(count):
                middle, stride = width * 2**stage, 2 if stage and not number else 1
                outside = middle * block.expansion
                same = inside == outside and stride == 1
                shortcut = M.Identity() if same else conv_bn(inside, outside, 1, stride, None)
                layers.append(block(inside, middle, stride, shortcut))
                inside = outside
        self.layers, self.fc = M.Sequential(*layers), M.Linear(inside, classes)

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        x = F.adaptive_avg_pool2d(self.layers(self.pool(self.stem(x))), 1)
        return self.fc(F.flatten(x, 1))


class VGG16(M.Module):
    """VGG16 with BatchNorm at any width: thirteen 3x3 convolutions, three linear layers."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        layers, inside = [], 3
        for factor, count in ((1, 2), (2, 2), (4, 3), (8, 3), (8, 3)):
            for _ in range(count):
                layers.append(conv_bn(inside, factor * width, 3))
                inside = factor * width
            layers.append(M.MaxPool2d(2, 2))
        self.features = M.Sequential(*layers)
        hidden = 16 * width
        self.classifier = M.Sequential(
            M.Linear(inside * 4, hidden), M.ReLU(), M.Dropout(), M.Linear(hidden, hidden), M.ReLU()
        )
        self.head = M.Linear(hidden, classes)

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        return self.head(self.classifier(F.flatten(self.features(x), 1)))


@dataclass(frozen=True)
class Network:
    """A network and how it is quantized.

    Attributes:
        name: in the table.
        family: the packaged recipe of its family.
        build: makes it, in eval mode.
        inputs: (count, seed) -> a batch.
        forms: the forms of file that it is exported to.
        serial: whether MegEngine may not run ahead, because of ops that race there.
        learned: whether its weights are those of training.
    """

    name: str
    family: str
    build: Callable[[], M.Module]
    inputs: Callable[[int, int], Batch]
    forms: tuple[str, ...] = ("onnx", "tflite")
    serial: bool = False
    learned: bool = False


def _images(size: int) -> Callable[[int, int], Batch]:
    return lambda count, seed: images(count, 3, size, size, seed=seed)


def _settled(make: Callable[[], M.Module], size: int = 64) -> Callable[[], M.Module]:
    return lambda: settle(make(), 3, size, size)


def _detector_images(count: int, seed: int) -> Batch:
    return bounded(count, seed, 64)


def _shapes(count: int, seed: int) -> Batch:
    from examples.detector import data

    part = data.load("test", count * (seed + 1))
    return data.normalize(part.images[-count:])


def _detector() -> M.Module:
    from examples.detector.net import pretrained

    return pretrained()


def _digits(count: int, seed: int) -> Batch:
    from examples import digits

    return digits.load().test.images[count * seed : count * (seed + 1)]


def _digits_net() -> M.Module:
    from examples import digits

    mge.random.seed(0)
    model = digits.Net()
    groups = [{"params": list(model.parameters())}]
    digits.fit(model, groups, digits.load().train, epochs=6, lr=0.1, seed=0, title="digits")
    model.eval()
    return model


_ALL = tuple(TARGETS)
NETWORKS = (
    Network(
        "ResNet-18", "resnet", _settled(lambda: FourStages(Basic, (2, 2, 2, 2), 32, 100)), _images(64), _ALL
    ),
    Network(
        "ResNet-50",
        "resnet",
        _settled(lambda: FourStages(Bottleneck, (3, 4, 6, 3), 16, 100)),
        _images(64),
        _ALL,
    ),
    Network("MobileNetV2", "mobilenet_v2", _settled(lambda: MobileNetV2(0.5, 100)), _images(64), _ALL),
    Network("MobileNetV3", "mobilenet_v3", mobilenet.mobilenet_v3, _images(32)),
    Network("ShuffleNetV2", "shufflenet_v2", shufflenet.shufflenet_v2, _images(32)),
    Network("RepVGG", "repvgg", repvgg.repvgg_deploy, _images(32)),
    Network("RegNetX", "regnet_x", regnet.regnet_x, _images(32)),
    Network("RegNetY", "regnet_y", regnet.regnet_y, _images(32)),
    Network("EfficientNet-lite", "efficientnet_lite", efficientnet.efficientnet_lite, _images(32)),
    Network("VGG16-BN", "vgg", _settled(lambda: VGG16(16, 100)), _images(64), _ALL),
    Network(
        "CSPDarknet, PAFPN, YOLOX head", "yolox", lambda: trained(Yolox()), _detector_images, serial=True
    ),
    Network("RetinaNet head, FPN", "retinanet", lambda: trained(RetinaNet()), _detector_images, serial=True),
    Network("digits (trained)", "resnet", _digits_net, _digits, learned=True),
    Network("shapes detector (trained)", "fcos", _detector, _shapes, serial=True, learned=True),
)


@dataclass
class Result:
    """The results of one network's files in all runtimes, and of its counted ops in onnxruntime.

    Attributes:
        network: the network.
        reports: runtime -> the report of verify.
        integer: the number of counted ops on integer kernels.
        counted: the number of counted ops.
        floats: (result, op, reason) of the counted ops on float kernels.
        ends: the number of float ops whose result the recipe leaves in float, as detectors' last layers.
    """

    network: Network
    reports: dict[str, VerifyReport] = field(default_factory=dict)
    integer: int = 0
    counted: int = 0
    floats: tuple[tuple[str, str, str], ...] = ()
    ends: int = 0


class Prepared:
    """A network that was traced, and its batches: two to calibrate, one to verify."""

    def __init__(self, network: Network, count: int = 4) -> None:
        self.network = network
        self.batches = [network.inputs(count, seed) for seed in range(3)]
        module = network.build()
        self.traced = qtrace.trace(module, self.batches[0][:2], check=False)

    def converted(self, form: str, folder: Path) -> TracedModule:
        """Returns the network, converted with the recipe of its family for the target of ``form``."""
        recipe = folder / "recipe.yaml"
        recipe.write_text(f"schema: qtrace/1\nimports: [{TARGETS[form]}, {self.network.family}]\n")
        prepared = qtrace.prepare(self.traced, rounded_to_nearest(qtrace.load_recipe(recipe)))
        return qtrace.convert(qtrace.calibrate(prepared, self.batches[:2], progress=False))


def measure(network: Network, folder: Path) -> Result:
    """Exports a network to its forms and verifies each file in each runtime that reads it."""
    level, result = mge.config.async_level, Result(network)
    mge.config.async_level = 0 if network.serial else level
    try:
        prepared = Prepared(network)
        for form in network.forms:
            _verify(prepared, form, folder, result)
    finally:
        mge.config.async_level = level
    return result


def _verify(prepared: Prepared, form: str, folder: Path, result: Result) -> None:
    converted = prepared.converted(form, folder)
    suffix = "param" if form == "ncnn" else form
    options = {"format": "megengine"} if form == "mge" else {}
    path = qtrace.export(converted, folder / f"m.{suffix}", **options)
    for runtime in (r for r, f in RUNTIMES.items() if f == form):
        fused = runtime != "openvino"
        report = qtrace.verify(path, converted, prepared.batches[2:], runtime=runtime, optimized=fused)
        result.reports[runtime] = report
    if form == "onnx":
        _count(path, result)


def _count(path: Path, result: Result) -> None:
    """Counts the ops that run on integers in onnxruntime."""
    import onnx

    kernels: Any = result.reports["onnxruntime"].kernels
    ops = {o: n.op_type for n in onnx.load(path).graph.node for o in n.output}
    result.floats = tuple(f for f in kernels.floats if f[1] in COUNTED)
    result.integer = sum(ops[name] in COUNTED for name in kernels.integer)
    result.counted = result.integer + len(result.floats)
    result.ends = sum(why.startswith("its result is not rounded") for *_, why in result.floats)

"""The networks of the zoo, with the facts that the tests need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import megengine.module as M
import numpy as np

from tests.zoo import (
    convnext,
    darknet,
    densenet,
    efficientnet,
    ghostnet,
    hrnet,
    mobilenet,
    native,
    regnet,
    repvgg,
    resnest,
    resnet,
    restoration,
    segmentation,
    shufflenet,
    vgg,
)
from tests.zoo.parts import pictures

__all__ = ["CNN", "Entry"]


@dataclass(frozen=True)
class Entry:
    """A convolutional network of the zoo.

    Attributes:
        name: the name of the network; unique.
        family: the family of networks that share a recipe; the recipe's name, unless ``plain``.
        build: makes the module, in eval mode, with the same weights every time.
        input_shape: shape of one image.
        sqnr: the least SQNR of the outputs in 8 bits after calibration, in dB.
        other_sizes: other heights and widths that the network takes.
        slow: whether only the slow tests run it, because another entry shows almost the same.
        plain: whether its family has no recipe: it is quantized by the default one.
        note: why ``sqnr`` is below 20, if it is.
        share: the least share of the MACs that is computed on integers.
        ends: modules behind which the graph stays float; None for all of it on integers.
    """

    name: str
    family: str
    build: Callable[[], M.Module]
    input_shape: tuple[int, ...]
    sqnr: float
    other_sizes: tuple[tuple[int, int], ...] = ((48, 32),)
    slow: bool = False
    plain: bool = False
    note: str = ""
    share: float = 0.99
    ends: tuple[str, ...] | None = None

    @property
    def recipe(self) -> str:
        """The name of the recipe that it is quantized by."""
        return "onnxruntime" if self.plain else self.family

    @property
    def other_sqnr(self) -> float:
        """The least SQNR on images of another size, in dB."""
        return self.sqnr / 2

    def calibration(self) -> list[tuple[np.ndarray]]:
        """Two batches of eight images."""
        return [(pictures(8, *self.input_shape, seed=seed),) for seed in (2, 3)]

    def example(self) -> tuple[np.ndarray]:
        """Two images of the calibration: of so few, the ranges of others would be another matter."""
        return (self.calibration()[0][0][:2],)

    def probes(self) -> list[tuple[np.ndarray]]:
        """The example, another batch size, and other image sizes."""
        channels = self.input_shape[0]
        return [
            self.example(),
            (pictures(3, *self.input_shape, seed=4),),
            *((pictures(1, channels, *size, seed=5),) for size in self.other_sizes),
        ]


_IMAGE = (3, 32, 32)
_SMALL = (3, 16, 16)


def _entry(
    family: str,
    build: Callable[[], M.Module],
    sqnr: float,
    shape: tuple[int, ...] = _IMAGE,
    sizes: tuple[tuple[int, int], ...] = ((48, 32),),
    slow: bool = False,
    plain: bool = False,
) -> Entry:
    """An entry that is named as its builder."""
    return Entry(build.__name__, family, build, shape, sqnr, other_sizes=sizes, slow=slow, plain=plain)


# The floors stand about 2 dB below what was measured, and at 20 at least.
CNN: tuple[Entry, ...] = (
    _entry("resnet", resnet.resnet_basic, 33, sizes=()),
    _entry("resnet", resnet.resnet_bottleneck, 25, slow=True),
    _entry("resnet", resnet.resnet_d, 27, slow=True),
    _entry("resnet", resnet.resnet_ibn, 29, slow=True),
    _entry("resnet", resnet.se_resnet_basic, 30, slow=True),
    _entry("resnet", resnet.se_resnet_bottleneck, 33),
    _entry("resnext", resnet.resnext, 28),
    _entry("wide_resnet", resnet.wide_resnet, 31),
    _entry("resnest", resnest.resnest, 25, plain=True),
    _entry("resnest", resnest.resnest_single, 20, slow=True, plain=True),
    _entry("mobilenet_v1", mobilenet.mobilenet_v1, 33, sizes=()),
    _entry("mobilenet_v2", mobilenet.mobilenet_v2_relu6, 31),
    _entry("mobilenet_v2", mobilenet.mobilenet_v2_clip, 31, slow=True),
    _entry("mobilenet_v2", mobilenet.mobilenet_v2_minimum, 32, slow=True),
    _entry("mobilenet_v2", mobilenet.mobilenet_v2_relu, 30, slow=True),
    _entry("mobilenet_v3", mobilenet.mobilenet_v3, 27),
    _entry("mobilenet_v3", mobilenet.mobilenet_v3_composed, 27, slow=True),
    _entry("shufflenet_v1", shufflenet.shufflenet_v1, 33),
    _entry("shufflenet_v2", shufflenet.shufflenet_v2, 28),
    _entry("regnet_x", regnet.regnet_x, 33),
    _entry("regnet_y", regnet.regnet_y, 32),
    _entry("efficientnet", efficientnet.efficientnet_b0, 34),
    _entry("efficientnet", efficientnet.efficientnet_swish, 34, slow=True),
    _entry("efficientnet_lite", efficientnet.efficientnet_lite, 31),
    _entry("efficientnet_v2", efficientnet.efficientnet_v2, 30),
    _entry("vgg", vgg.vgg, 29, sizes=(), slow=True),
    _entry("vgg", vgg.vgg_bn, 33, sizes=()),
    _entry("alexnet", vgg.alexnet, 38, (3, 64, 64), ((64, 96),), slow=True, plain=True),
    _entry("repvgg", repvgg.repvgg_train, 35),
    _entry("repvgg", repvgg.repvgg_deploy, 35, slow=True),
    _entry("repvgg", repvgg.repvgg_groups_train, 39, slow=True),
    _entry("repvgg", repvgg.repvgg_groups_deploy, 39, slow=True),
    _entry("repvgg", repvgg.repvgg_se_train, 34, slow=True),
    _entry("repvgg", repvgg.repvgg_se_deploy, 34, slow=True),
    _entry("hrnet", hrnet.hrnet, 28),
    _entry("hrnet", hrnet.hrnet_bilinear, 28, slow=True),
    _entry("densenet", densenet.densenet, 36),
    _entry("hardnet", densenet.hardnet, 33, slow=True, plain=True),
    _entry("ghostnet", ghostnet.ghostnet, 34),
    _entry("convnext", convnext.convnext, 34),
    _entry("van", convnext.van, 24, slow=True, plain=True),
    _entry("csp_darknet", darknet.csp_darknet, 22),
    _entry("csp_darknet", darknet.csp_darknet_relu, 23, slow=True),
    _entry("csp_darknet", darknet.csp_darknet_sigmoid, 22, slow=True),
    _entry("darknet53", darknet.darknet53, 30),
    _entry("darknet53", darknet.darknet53_functional, 30, slow=True),
    _entry("unet", segmentation.unet_transposed, 33),
    _entry("unet", segmentation.unet_bilinear, 29, slow=True),
    _entry("deeplabv3plus", segmentation.deeplab, 30),
    _entry("deeplabv3plus", segmentation.deeplab_broadcast, 30, slow=True),
    _entry("bisenet", segmentation.bisenet, 27, slow=True, plain=True),
    _entry("espnet", segmentation.espnet, 32, plain=True),
    _entry("simplebaseline", segmentation.simplebaseline, 30),
    _entry("edsr", restoration.edsr, 27, _SMALL, ((12, 20),), plain=True),
    _entry("edsr", restoration.edsr_function, 27, _SMALL, ((12, 20),), slow=True, plain=True),
    _entry("edsr", restoration.edsr_by_hand, 27, _SMALL, ((12, 20),), slow=True, plain=True),
    _entry("rcan", restoration.rcan, 26, _SMALL, ((12, 20),), plain=True),
    _entry("dncnn", restoration.dncnn, 34, _SMALL, ((12, 20),), plain=True),
    _entry("noise_unet", restoration.noise_unet, 26, _SMALL, ((12, 20),), plain=True),
    _entry("native", native.native, 38, plain=True),
    _entry("lightcnn", native.lightcnn, 33, sizes=(), plain=True),
)

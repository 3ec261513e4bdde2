"""The detectors of the zoo."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.zoo.detectors.dense import Atss, Fcos, FreeAnchor, RetinaNet
from tests.zoo.detectors.detr import Detr
from tests.zoo.detectors.entry import Entry, bounded, trained
from tests.zoo.detectors.regions import BoxNet, CenterNet, ProposalNet
from tests.zoo.detectors.yolo import YoloV3, Yolox

__all__ = ["DETECTORS"]


def _with_regions(count: int, seed: int, size: int) -> tuple[Any, ...]:
    """Images and four boxes on each, with the number of the image in front."""
    boxes = _boxes(count, seed, size, 4).reshape(-1, 4)
    numbers = np.repeat(np.arange(count, dtype=np.float32), 4)[:, None]
    return bounded(count, seed, size), np.concatenate([numbers, boxes], axis=1)


def _with_targets(count: int, seed: int, size: int) -> tuple[Any, ...]:
    return bounded(count, seed, size), _boxes(count, seed, size, 2)


def _boxes(count: int, seed: int, size: int, each: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    low = rng.uniform(0, 0.5, (count, each, 2))
    sides = rng.uniform(0.15, 0.5, (count, each, 2))
    return (np.concatenate([low, low + sides], axis=2) * size).astype(np.float32)


_PEAKS = (
    "a peak is where a value equals its neighbourhood's largest: where the error moves one, all of it is lost"
)

# The floors stand about 2 dB below what was measured.
DETECTORS = (
    Entry("retinanet", "retinanet", lambda: trained(RetinaNet())),
    Entry("retinanet:infer", "retinanet", lambda: trained(RetinaNet(infer=True)), sqnr=35, slow=True),
    Entry(
        "freeanchor:train",
        "freeanchor",
        lambda: trained(FreeAnchor()),
        sqnr=21,
        inputs=_with_targets,
        ends=("head",),  # overlaps of boxes need more than 8 bits
        slow=True,
    ),
    Entry("fcos", "fcos", lambda: trained(Fcos()), sqnr=22),
    Entry("fcos:infer", "fcos", lambda: trained(Fcos(infer=True)), sqnr=41, slow=True),
    Entry("atss", "atss", lambda: trained(Atss()), sqnr=21),
    Entry("atss:infer", "atss", lambda: trained(Atss(infer=True)), sqnr=30, slow=True),
    Entry("faster_rcnn:rpn", "faster_rcnn", lambda: trained(ProposalNet()), sqnr=22),
    Entry(
        "faster_rcnn:box", "faster_rcnn", lambda: trained(BoxNet()), sqnr=35, inputs=_with_regions, slow=True
    ),
    Entry("centernet", "centernet", lambda: trained(CenterNet()), sqnr=39, slow=True),
    Entry("centernet:infer", "centernet", lambda: trained(CenterNet(infer=True)), sqnr=18, note=_PEAKS),
    Entry("yolov3", "yolov3", lambda: trained(YoloV3()), sqnr=30),
    Entry("yolov3:infer", "yolov3", lambda: trained(YoloV3(infer=True)), sqnr=38, slow=True),
    Entry("yolox", "yolox", lambda: trained(Yolox()), sqnr=40),
    Entry("yolox_nano", "yolox", lambda: trained(Yolox(depthwise=True)), sqnr=37, slow=True),
    Entry("yolox:infer", "yolox", lambda: trained(Yolox(infer=True)), sqnr=61, slow=True),
    Entry("detr", "detr", lambda: trained(Detr()), sqnr=22, share=0.95),
)

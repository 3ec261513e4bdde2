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


_PEAKS = "a peak is where a value equals its neighbourhood's largest: coarser values have ties"
_ATTENTION = "the first decoder layer meets values in its cross attention that calibration did not"

DETECTORS = (
    Entry("retinanet", "retinanet", lambda: trained(RetinaNet()), slow=True),
    Entry("retinanet:infer", "retinanet", lambda: trained(RetinaNet(infer=True))),
    Entry(
        "freeanchor:train",
        "freeanchor",
        lambda: trained(FreeAnchor()),
        inputs=_with_targets,
        ends=("head",),  # overlaps of boxes need more than 8 bits
        slow=True,
    ),
    Entry("fcos", "fcos", lambda: trained(Fcos()), slow=True),
    Entry("fcos:infer", "fcos", lambda: trained(Fcos(infer=True))),
    Entry("atss", "atss", lambda: trained(Atss())),
    Entry("atss:infer", "atss", lambda: trained(Atss(infer=True)), slow=True),
    Entry("faster_rcnn:rpn", "faster_rcnn", lambda: trained(ProposalNet())),
    Entry("faster_rcnn:box", "faster_rcnn", lambda: trained(BoxNet()), inputs=_with_regions),
    Entry("centernet", "centernet", lambda: trained(CenterNet()), slow=True),
    Entry("centernet:infer", "centernet", lambda: trained(CenterNet(infer=True)), sqnr=6, note=_PEAKS),
    Entry("yolov3", "yolov3", lambda: trained(YoloV3())),
    Entry("yolov3:infer", "yolov3", lambda: trained(YoloV3(infer=True)), slow=True),
    Entry("yolox", "yolox", lambda: trained(Yolox()), slow=True),
    Entry("yolox_nano", "yolox", lambda: trained(Yolox(depthwise=True)), slow=True),
    Entry("yolox:infer", "yolox", lambda: trained(Yolox(infer=True))),
    Entry("detr", "detr", lambda: trained(Detr()), sqnr=17, note=_ATTENTION),
)

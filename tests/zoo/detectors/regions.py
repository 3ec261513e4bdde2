"""Detectors that are not dense on a pyramid: Faster R-CNN's parts, and CenterNet."""

from __future__ import annotations

from typing import Any

import megengine.functional as F
import megengine.module as M
from megengine import Tensor

from tests.zoo.detectors.blocks import Backbone, Layer, Pyramid

__all__ = ["BoxNet", "CenterNet", "ProposalNet"]

CHANNELS = 8
CLASSES = 3


def _pyramid() -> Pyramid:
    return Pyramid(Backbone(), ("res2", "res3", "res4", "res5"), CHANNELS, pooled_top=True)


class ProposalNet(M.Module):
    """Backbone, pyramid and the proposal head: one 3x3 layer, then scores and offsets."""

    def __init__(self, anchors: int = 3) -> None:
        super().__init__()
        self.backbone = _pyramid()
        self.rpn_conv = M.Conv2d(CHANNELS, CHANNELS, 3, stride=1, padding=1)
        self.rpn_cls_score = M.Conv2d(CHANNELS, anchors, 1, stride=1)
        self.rpn_bbox_offsets = M.Conv2d(CHANNELS, anchors * 4, 1, stride=1)
        self.anchors = anchors

    def forward(self, x: Tensor) -> dict[str, list[Tensor]]:
        scores, offsets = [], []
        for level in self.backbone(x):
            hidden = F.relu(self.rpn_conv(level))
            score, offset = self.rpn_cls_score(hidden), self.rpn_bbox_offsets(hidden)
            count, _, height, width = score.shape
            scores.append(score.reshape(count, self.anchors, -1))
            offsets.append(offset.reshape(count, self.anchors, 4, height, width).transpose(0, 1, 3, 4, 2))
        return {"scores": scores, "offsets": offsets}


class BoxNet(M.Module):
    """The second stage on given regions (K, 5): every level is pooled, levels are picked by area."""

    def __init__(self, pool: int = 3) -> None:
        super().__init__()
        self.backbone = _pyramid()
        self.pool = pool
        self.fc1 = M.Linear(CHANNELS * pool * pool, 16)
        self.fc2 = M.Linear(16, 16)
        self.pred_cls = M.Linear(16, CLASSES + 1)
        self.pred_delta = M.Linear(16, CLASSES * 4)

    def forward(self, x: Tensor, regions: Tensor) -> tuple[Tensor, Tensor]:
        levels = self.backbone(x)[:2]
        side = F.sqrt((regions[:, 3] - regions[:, 1]) * (regions[:, 4] - regions[:, 2]))
        small = (side < 24.0).astype("float32").reshape(-1, 1, 1, 1)
        size = (self.pool, self.pool)
        fine, coarse = (
            F.vision.roi_align(level, regions, size, "average", 1.0 / stride, 2, True)
            for level, stride in zip(levels, (4, 8), strict=True)
        )
        pooled = F.flatten(fine * small + coarse * (1.0 - small), start_axis=1)
        hidden = F.relu(self.fc2(F.relu(self.fc1(pooled))))
        logits, deltas = self.pred_cls(hidden), self.pred_delta(hidden)
        return F.softmax(logits, axis=1), deltas.reshape(-1, CLASSES, 4)


class CenterNet(M.Module):
    """A backbone, transposed convolutions back to stride 4, and three small heads."""

    def __init__(self, infer: bool = False) -> None:
        super().__init__()
        self.infer = infer
        self.backbone = Backbone(freeze=False)
        self.deconv_layers = M.Sequential(*self.growing(self.backbone.channels["res5"], (12, 8, 8)))
        self.cls_head = self.branch(CLASSES)
        self.wh_head = self.branch(2)
        self.reg_head = self.branch(2)

    def growing(self, inside: int, sizes: tuple[int, ...]) -> list[M.Module]:
        layers: list[M.Module] = []
        for outside in sizes:
            layers += [Layer(inside, outside, 3, 1, 1, M.BatchNorm2d(outside), F.relu)]
            layers += [M.ConvTranspose2d(outside, outside, 4, 2, 1, bias=False), M.BatchNorm2d(outside)]
            layers += [M.ReLU()]
            inside = outside
        return layers

    def branch(self, outside: int) -> M.Sequential:
        return M.Sequential(M.Conv2d(8, 8, 3, padding=1), M.ReLU(), M.Conv2d(8, outside, 1))

    def forward(self, x: Tensor) -> dict[str, Any]:
        x = self.deconv_layers(self.backbone(x))
        heat = F.clip(F.sigmoid(self.cls_head(x)), 1e-4, 1 - 1e-4)
        if self.infer:
            peaks = F.max_pool2d(heat, 3, 1, 1)
            heat = heat * (peaks == heat).astype("float32")
        return {"cls": heat, "wh": self.wh_head(x), "reg": self.reg_head(x)}

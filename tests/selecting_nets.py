"""Small networks that select: detectors with top-k, peaks, queries, retrieval, beams, masks and experts.

The weights are random. The heads are scaled so that scores spread like those of trained networks: a few
stand out, and most are low.
"""

from __future__ import annotations

from collections.abc import Callable

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
from megengine import Tensor

from tests.nets import randomize
from tests.zoo.detectors.detr import DecoderLayer, EncoderLayer

__all__ = ["NETS", "build", "pictures"]


def pictures(count: int, seed: int, size: int = 64) -> np.ndarray:
    """Smooth backgrounds with bright rectangles, in -1 to 1 and beyond."""
    rng = np.random.default_rng(seed)
    images = np.empty((count, 3, size, size), np.float32)
    for image in images:
        coarse = rng.normal(size=(3, 5, 5))
        image[:] = np.kron(coarse, np.ones((-(-size // 5),) * 2))[:, :size, :size] * 0.4
        for _ in range(6):
            top, left = rng.integers(0, size - 12, 2)
            high, wide = rng.integers(5, 24, 2)
            image[:, top : top + high, left : left + wide] = rng.normal(size=(3, 1, 1)) * 1.5
        image += rng.normal(size=image.shape) * 0.1
    return images


class Backbone(M.Module):
    """Four stages of two convolutions, each stage half the size of the one before it."""

    def __init__(self, width: int = 32, stages: int = 3) -> None:
        super().__init__()
        self.layers, inside = [], 3
        for stage in range(stages):
            outside = width if stage else width // 2
            self.layers += [
                M.ConvBnRelu2d(inside, outside, 3, 2, 1),
                M.ConvBnRelu2d(outside, outside, 3, 1, 1),
            ]
            inside = outside

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """Gathers rows of ``x`` (N, L, C) by ``index`` (N, K)."""
    wide = F.broadcast_to(F.expand_dims(index, 2), (*index.shape, x.shape[2]))
    return F.gather(x, 1, wide)


class RtDetr(M.Module):
    """The best cells of the encoder's memory are the queries of a decoder (RT-DETR)."""

    def __init__(self, width: int = 32, queries: int = 12, classes: int = 5) -> None:
        super().__init__()
        self.backbone, self.queries = Backbone(width), queries
        self.encoder = EncoderLayer(width, 4)
        self.position = mge.Parameter(
            np.random.default_rng(1).normal(size=(1, 64, width)).astype(np.float32) * 0.3
        )
        self.enc_output, self.enc_norm = M.Linear(width, width), M.LayerNorm(width)
        self.enc_score, self.enc_box = M.Linear(width, classes), M.Linear(width, 4)
        self.decoder = [DecoderLayer(width, 4) for _ in range(2)]
        self.query_pos = M.Linear(4, width)
        self.scores, self.boxes = M.Linear(width, classes), M.Linear(width, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        memory = F.flatten(self.backbone(x), 2).transpose(0, 2, 1)
        memory = self.encoder(memory, self.position)
        output = self.enc_norm(self.enc_output(memory))
        _, index = F.topk(F.max(self.enc_score(output), axis=2), self.queries, descending=True)
        target = _rows(output, index)
        reference = self.enc_box(target)
        for layer in self.decoder:
            target = layer(target, memory, self.position, self.query_pos(F.sigmoid(reference)))
            reference = reference + self.boxes(target)
        return F.sigmoid(self.scores(target)), F.sigmoid(reference)


class YoloV10(M.Module):
    """A head without suppression: the best cells, then the best of their classes (YOLOv10)."""

    def __init__(self, width: int = 32, classes: int = 6, limit: int = 16) -> None:
        super().__init__()
        self.backbone, self.limit, self.classes = Backbone(width), limit, classes
        self.box = M.Sequential(M.ConvBnRelu2d(width, width, 3, 1, 1), M.Conv2d(width, 4, 1))
        self.cls = M.Sequential(M.ConvBnRelu2d(width, width, 3, 1, 1), M.Conv2d(width, classes, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features = self.backbone(x)
        boxes = F.flatten(self.box(features), 2).transpose(0, 2, 1) * 8.0
        scores = F.sigmoid(F.flatten(self.cls(features), 2).transpose(0, 2, 1))
        _, index = F.topk(F.max(scores, axis=2), self.limit, descending=True)
        boxes, scores = _rows(boxes, index), _rows(scores, index)
        best, place = F.topk(F.flatten(scores, 1), self.limit, descending=True)
        return _rows(boxes, place // self.classes), best, place % self.classes


class CenterNet(M.Module):
    """A heat map's peaks, the best of them, and what other maps say there."""

    def __init__(self, width: int = 32, classes: int = 4, limit: int = 10) -> None:
        super().__init__()
        self.backbone, self.limit, self.classes = Backbone(width, 2), limit, classes
        self.heat = M.Sequential(M.ConvBnRelu2d(width, width, 3, 1, 1), M.Conv2d(width, classes, 1))
        self.size = M.Sequential(M.ConvBnRelu2d(width, width, 3, 1, 1), M.Conv2d(width, 2, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features = self.backbone(x)
        heat = F.sigmoid(self.heat(features))
        peaks = heat * F.equal(F.max_pool2d(heat, 3, 1, 1), heat).astype("float32")
        score, place = F.topk(F.flatten(peaks, 1), self.limit, descending=True)
        sizes = F.flatten(self.size(features), 2).transpose(0, 2, 1)
        cells = sizes.shape[1]
        return score, _rows(sizes, place % cells), place // cells


class Retrieval(M.Module):
    """The item of a table that is nearest to an image, and its vector."""

    def __init__(self, width: int = 32, items: int = 20) -> None:
        super().__init__()
        self.backbone, self.project = Backbone(width), M.Linear(width, width)
        self.items = mge.Parameter(np.random.default_rng(2).normal(size=(items, width)).astype(np.float32))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        vector = F.normalize(self.project(self.backbone(x).mean(axis=(2, 3))), axis=1)
        index = F.argmax(F.matmul(vector, self.items, transpose_b=True), axis=1)
        return index, F.nn.embedding(index, self.items)


class Ssd(M.Module):
    """The best boxes of each class."""

    def __init__(self, width: int = 32, classes: int = 3, limit: int = 8) -> None:
        super().__init__()
        self.backbone, self.classes, self.limit = Backbone(width), classes, limit
        self.box, self.cls = M.Conv2d(width, 4, 3, 1, 1), M.Conv2d(width, classes + 1, 3, 1, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.backbone(x)
        boxes = F.flatten(self.box(features), 2).transpose(0, 2, 1)
        scores = F.softmax(F.flatten(self.cls(features), 2), axis=1)[:, 1:]
        best, index = F.topk(scores.reshape(-1, scores.shape[2]), self.limit, descending=True)
        picked = _rows(boxes, index.reshape(x.shape[0], -1))
        return best.reshape(x.shape[0], self.classes, -1), picked.reshape(x.shape[0], self.classes, -1, 4)


class Beam(M.Module):
    """Rows in the order of their scores, the first of them go on to a layer."""

    def __init__(self, width: int = 32, beams: int = 6) -> None:
        super().__init__()
        self.backbone, self.beams = Backbone(width), beams
        self.score, self.next = M.Linear(width, 1), M.Linear(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = F.flatten(self.backbone(x), 2).transpose(0, 2, 1)
        score = self.score(rows)[:, :, 0]
        order = F.argsort(score, descending=True)[:, : self.beams]
        best = F.gather(score, 1, order)
        return best, F.relu(self.next(_rows(rows, order)))


class Masked(M.Module):
    """Values above a threshold, the others 0."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.backbone, self.head = Backbone(width, 2), M.Conv2d(width, 4, 1)
        self.tail = M.Conv2d(4, 8, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(self.backbone(x))
        return self.tail(y * (y > 0.5).astype("float32"))


class Experts(M.Module):
    """Each row goes to the two experts of its highest gates."""

    def __init__(self, width: int = 32, experts: int = 4) -> None:
        super().__init__()
        self.backbone, self.gate = Backbone(width), M.Linear(width, experts)
        self.experts = [M.Linear(width, width) for _ in range(experts)]

    def forward(self, x: Tensor) -> Tensor:
        rows = F.flatten(self.backbone(x), 2).transpose(0, 2, 1)
        logits = self.gate(rows)
        best, _ = F.topk(logits.reshape(-1, logits.shape[2]), 2, descending=True)
        second = best.reshape(logits.shape[0], -1, 2)[:, :, 1:]
        kept = F.where(logits >= second, logits, F.full_like(logits, -1e4))
        weights = F.softmax(kept, axis=2)
        mixed = [F.relu(e(rows)) * weights[:, :, i : i + 1] for i, e in enumerate(self.experts)]
        return sum(mixed[1:], mixed[0])


class Suppressed(M.Module):
    """Boxes that survive a suppression of overlaps, of one image."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.backbone = Backbone(width)
        self.box, self.cls = M.Conv2d(width, 4, 1), M.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.backbone(x)
        sides = F.flatten(F.sigmoid(self.box(features)), 2)[0].transpose(1, 0) * 12.0
        scores = F.sigmoid(F.flatten(self.cls(features), 2)[0, 0])
        cells = F.arange(0, 64, 1)
        center = F.stack([(cells % 8) * 8.0 + 4.0, F.floor(cells / 8) * 8.0 + 4.0], axis=1)
        boxes = F.concat([center - sides[:, :2], center + sides[:, 2:]], axis=1)
        keep = F.vision.nms(boxes, scores, 0.3)
        return boxes[keep], scores[keep]


NETS: dict[str, Callable[[], M.Module]] = {
    "rt_detr": RtDetr,
    "yolov10": YoloV10,
    "centernet": CenterNet,
    "retrieval": Retrieval,
    "ssd": Ssd,
    "beam": Beam,
    "masked": Masked,
    "experts": Experts,
    "nms": Suppressed,
}
_SCORES = ("enc_score", "scores", "cls", "heat", "score", "gate")


def build(name: str, seed: int = 0) -> M.Module:
    """Returns the network ``name`` in eval mode: random weights, its own statistics, unlike scores."""
    network = randomize(NETS[name](), seed)
    _adopt_statistics(network, pictures(8, 1000 + seed))
    for path, child in network.named_modules():
        biased = isinstance(child, (M.Linear, M.Conv2d)) and child.bias is not None and child.bias.shape
        if biased and path.split(".")[0] in _SCORES:
            child.weight._reset(child.weight * 3.0)
            child.bias._reset(child.bias * 0.0 - 2.0)
    return network


def _adopt_statistics(network: M.Module, images: np.ndarray) -> None:
    """Gives BatchNorms the statistics of the data, as training does."""
    norms = [child for child in network.modules() if isinstance(child, M.BatchNorm2d)]
    for norm in norms:
        norm.momentum = 0.0
        norm.training = True
    size = 1 if isinstance(network, Suppressed) else len(images)
    level, mge.config.async_level = mge.config.async_level, 0  # F.gather aborts in a queue
    try:
        for start in range(0, len(images), size):
            network(Tensor(images[start : start + size]))
    finally:
        mge.config.async_level = level
    for norm in norms:
        norm.momentum = 0.9
    network.eval()

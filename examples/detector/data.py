"""Shapes on noise: a detection data set that is generated, the same on every machine and in every run.

One to five circles, squares, triangles and crosses stand, tilted and tinted, on a textured background of
64 x 64 pixels. Boxes come from the geometry, not from the pixels. An image depends on nothing but its part
and its number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

CLASSES = ("circle", "square", "triangle", "cross")
SIZE = 64

# How many images each part has, and the seed that keeps it apart from the others.
PARTS = {"train": (5000, 1), "calibration": (128, 2), "validation": (300, 3), "test": (500, 4)}

# A pixel v enters the network as (v - MEAN) / STD; the recipes say the same in their `preprocess`.
MEAN, STD = 127.5, 64.0

_RADII = (5.0, 18.0)
_TILT = 0.35  # radians to either side
_MAX_IOU = 0.05
_MIN_CONTRAST = 60.0

Signed = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Part:
    """Images and what is in them.

    Attributes:
        images: N x 3 x SIZE x SIZE, uint8, blue first.
        boxes: for each image n x 4, float32: left, top, right, bottom in pixels.
        labels: for each image n class numbers.
    """

    images: np.ndarray
    boxes: list[np.ndarray]
    labels: list[np.ndarray]

    def __len__(self) -> int:
        return len(self.images)

    def first(self, count: int) -> Part:
        """The first ``count`` images."""
        return Part(self.images[:count], self.boxes[:count], self.labels[:count])


def load(name: str, count: int | None = None) -> Part:
    """Generates a part, or its first ``count`` images."""
    size, seed = PARTS[name]
    drawn = [draw(seed, index) for index in range(min(size, count or size))]
    images, boxes, labels = zip(*drawn, strict=True)
    return Part(np.stack(images), list(boxes), list(labels))


def normalize(images: np.ndarray) -> np.ndarray:
    """Pixels as the network takes them."""
    return (images.astype(np.float32) - np.float32(MEAN)) / np.float32(STD)


def save_images(part: Part, folder: Path) -> None:
    """Writes ``part`` as PNG files, without loss."""
    import cv2

    folder.mkdir(parents=True)
    for index, image in enumerate(part.images):
        cv2.imwrite(str(folder / f"{index:04d}.png"), image.transpose(1, 2, 0))


def draw(seed: int, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One image with its boxes and labels."""
    random = np.random.RandomState([seed, index])  # its streams are frozen for good, unlike default_rng's
    canvas = _background(random)
    boxes: list[np.ndarray] = []
    labels: list[int] = []
    count = random.randint(1, 6)
    for _ in range(8 * count):
        if len(boxes) == count:
            break
        label, radius, angle = random.randint(len(CLASSES)), _radius(random), random.uniform(-_TILT, _TILT)
        extent, signed = _SHAPES[CLASSES[label]](radius, angle)
        low, high = -extent[:2], SIZE - extent[2:]
        centre = low + random.uniform(size=2) * (high - low)
        box = np.concatenate([centre, centre]) + extent
        if boxes and _overlap(box, np.array(boxes)) > _MAX_IOU:
            continue
        _paint(canvas, box, centre, signed, random)
        boxes.append(box)
        labels.append(label)
    canvas += random.normal(0, random.uniform(3, 14), canvas.shape)
    image = np.clip(np.rint(canvas), 0, 255).astype(np.uint8)
    return image, np.array(boxes, np.float32), np.array(labels, np.int32)


def _radius(random: np.random.RandomState) -> float:
    """Small shapes are more frequent, as in photographs."""
    low, high = _RADII
    return float(low * (high / low) ** random.uniform())


def _background(random: np.random.RandomState) -> np.ndarray:
    """A smooth gradient between random colours on a coarse grid, with stripes across."""
    cells = random.randint(2, 9)
    coarse = random.uniform(30, 225, (3, 1, 1)) + random.normal(0, 30, (3, cells, cells))
    at = np.linspace(0, cells - 1, SIZE)
    base = np.minimum(at.astype(int), cells - 2)
    share = at - base
    rows = coarse[:, base] * (1 - share)[:, None] + coarse[:, base + 1] * share[:, None]
    smooth = rows[:, :, base] * (1 - share) + rows[:, :, base + 1] * share
    y, x = np.mgrid[:SIZE, :SIZE]
    angle, period = random.uniform(0, np.pi), random.uniform(4, 24)
    wave = np.sin((x * np.cos(angle) + y * np.sin(angle)) * 2 * np.pi / period)
    return smooth + random.uniform(0, 14) * wave


def _paint(
    canvas: np.ndarray, box: np.ndarray, centre: np.ndarray, signed: Signed, random: np.random.RandomState
) -> None:
    """Blends a shape into the canvas with smooth edges, in a colour that stands out from what is there."""
    left, top = np.floor(box[:2]).astype(int)
    right, bottom = np.ceil(box[2:]).astype(int)
    patch = canvas[:, top:bottom, left:right]
    under = patch.mean(axis=(1, 2))
    colour = random.uniform(10, 245, 3)
    while np.abs(colour - under).max() < _MIN_CONTRAST:
        colour = random.uniform(10, 245, 3)
    y, x = np.mgrid[top:bottom, left:right] + 0.5
    cover = np.clip(0.5 - signed(x - centre[0], y - centre[1]), 0, 1) * random.uniform(0.75, 1.0)
    patch += (colour[:, None, None] - patch) * cover


def _overlap(box: np.ndarray, others: np.ndarray) -> float:
    """The largest IoU of ``box`` with one of ``others``."""
    inner = np.minimum(box[2:], others[:, 2:]) - np.maximum(box[:2], others[:, :2])
    common = np.clip(inner, 0, None).prod(axis=1)
    area = (box[2:] - box[:2]).prod() + (others[:, 2:] - others[:, :2]).prod(axis=1)
    return float((common / (area - common)).max())


def _circle(radius: float, angle: float) -> tuple[np.ndarray, Signed]:
    return np.array([-radius, -radius, radius, radius]), lambda x, y: np.hypot(x, y) - radius


def _polygon(corners: int, radius: float, angle: float) -> tuple[np.ndarray, Signed]:
    """A regular polygon on its side: the signed distance is the largest one to an edge."""
    turns = angle + np.pi / 2 + 2 * np.pi * (np.arange(corners) + 0.5) / corners
    x, y = radius * np.cos(turns), radius * np.sin(turns)
    middles = turns + np.pi / corners
    inner = radius * np.cos(np.pi / corners)

    def signed(px: np.ndarray, py: np.ndarray) -> np.ndarray:
        away = [px * np.cos(m) + py * np.sin(m) - inner for m in middles]
        return np.max(away, axis=0)

    return np.array([x.min(), y.min(), x.max(), y.max()]), signed


def _cross(radius: float, angle: float) -> tuple[np.ndarray, Signed]:
    """Two bars, each a third as wide as long."""
    long, wide = radius * np.cos(np.arctan(1 / 3)), radius * np.sin(np.arctan(1 / 3))
    cos, sin = np.cos(angle), np.sin(angle)
    tips = [(a, b) for a in (-long, long) for b in (-wide, wide)]
    tips += [(b, a) for a, b in tips]
    x, y = np.array([(cos * a - sin * b, sin * a + cos * b) for a, b in tips]).T

    def signed(px: np.ndarray, py: np.ndarray) -> np.ndarray:
        u, v = np.abs(cos * px + sin * py), np.abs(cos * py - sin * px)
        return np.minimum(np.maximum(u - long, v - wide), np.maximum(v - long, u - wide))

    return np.array([x.min(), y.min(), x.max(), y.max()]), signed


_SHAPES: dict[str, Callable[[float, float], tuple[np.ndarray, Signed]]] = {
    "circle": _circle,
    "square": partial(_polygon, 4),
    "triangle": partial(_polygon, 3),
    "cross": _cross,
}

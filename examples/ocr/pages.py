"""Rendered small pages with lines of text on an uneven background: for the text detector, without labels."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageDraw

from examples.ocr.fonts import FAMILIES, font
from examples.ocr.text import phrase

SIZE = 320

# The seed of each part; its fonts are those of the same name in FAMILIES.
_SEEDS = {"calibration": 21, "test": 22}

# A pixel v, blue first, enters the network as (v / 255 - MEAN) / STD.
_MEAN, _STD = np.array([0.485, 0.456, 0.406], np.float32), np.array([0.229, 0.224, 0.225], np.float32)


def load(part: str, count: int) -> np.ndarray:
    """Renders the first ``count`` pages of a part: N x SIZE x SIZE x 3, uint8, blue first."""
    return np.stack([draw(part, index) for index in range(count)])


def draw(part: str, index: int, size: tuple[int, int] = (SIZE, SIZE), tilted: bool = True) -> np.ndarray:
    """Renders one page of a height and a width: lines in different sizes.

    Args:
        part: ``calibration`` or ``test``.
        index: the number of the page.
        size: height and width.
        tilted: whether some pages are tilted.
    """
    random = np.random.RandomState([_SEEDS[part], index])
    height, width = size
    image = _paper(random, size)
    pen, faces = ImageDraw.Draw(image), FAMILIES[part]
    luminance = float(np.asarray(image).mean())
    top = int(random.randint(4, 24))
    while top < height - 20:
        points = int(random.randint(12, 36))
        ink = random.randint(0, 70, size=3) if luminance > 127 else random.randint(190, 256, size=3)
        face = font(faces[random.randint(len(faces))], points)
        text = phrase(random, max(4, int(width / points * 1.6)))
        pen.text((int(random.randint(2, 60)), top), text, fill=tuple(int(v) for v in ink), font=face)
        top += round(points * random.uniform(1.3, 2.6))
    if random.rand() < 0.4 and tilted:
        image = image.rotate(float(random.uniform(-12, 12)), Image.Resampling.BILINEAR)
    pixels = np.asarray(image, np.float32)[:, :, ::-1]
    pixels = pixels + random.normal(0, random.uniform(0, 8), pixels.shape)
    return np.clip(np.rint(pixels), 0, 255).astype(np.uint8)


def normalize(pages: np.ndarray) -> np.ndarray:
    """Makes the detector's input, N x 3 x SIZE x SIZE."""
    scaled = (pages.astype(np.float32) / 255 - _MEAN) / _STD
    return np.ascontiguousarray(scaled.transpose(0, 3, 1, 2))


def _paper(random: np.random.RandomState, size: tuple[int, int]) -> Image.Image:
    """Draws a background of a height and a width whose colour changes slowly."""
    base = random.randint(150, 256, size=3) if random.rand() < 0.75 else random.randint(0, 90, size=3)
    coarse = np.clip(base + random.normal(0, 14, (5, 5, 3)), 0, 255).astype(np.uint8)
    return Image.fromarray(coarse).resize(size[::-1], Image.Resampling.BICUBIC)

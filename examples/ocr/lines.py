"""Rendered lines of text: the same on every machine with the same Pillow and matplotlib, and in every run.

A line depends on nothing but its part and its number.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

from examples.ocr.fonts import FAMILIES, font
from examples.ocr.text import phrase

HEIGHT, WIDTH = 48, 320

# The seed of each part; its fonts are those of the same name in FAMILIES.
_SEEDS = {"calibration": 11, "test": 12}

_LONGEST = 22  # characters: a line that is longer does not fit well into WIDTH
_SIZES = (18, 46)  # pixels of the font


@dataclass(frozen=True)
class Line:
    """A line of text.

    Attributes:
        text: what is written.
        pixels: HEIGHT x WIDTH x 3, uint8, blue first; the line stands at the left, the rest is empty.
        width: how many columns the line takes.
    """

    text: str
    pixels: np.ndarray
    width: int


def load(part: str, count: int) -> list[Line]:
    """Renders the first ``count`` lines of a part, ``calibration`` or ``test``."""
    return [draw(part, index) for index in range(count)]


def draw(part: str, index: int) -> Line:
    """Renders one line: dark on light or light on dark, a little noise, scaled to HEIGHT."""
    random = np.random.RandomState([_SEEDS[part], index])  # its streams are frozen for good
    text = phrase(random, _LONGEST)
    faces = FAMILIES[part]
    face = font(faces[random.randint(len(faces))], int(random.randint(*_SIZES)))
    left, top, right, bottom = face.getbbox(text)
    margins = random.randint(2, 6, size=4)
    size = (int(right - left + margins[0] + margins[1]), int(bottom - top + margins[2] + margins[3]))
    back, ink = _colours(random)
    image = Image.new("RGB", size, back)
    ImageDraw.Draw(image).text((margins[0] - left, margins[2] - top), text, fill=ink, font=face)
    width = min(WIDTH, max(HEIGHT, round(size[0] * HEIGHT / size[1])))
    image = image.resize((width, HEIGHT), Image.Resampling.BILINEAR)
    pixels = np.asarray(image, np.float32)[:, :, ::-1]
    pixels = pixels + random.normal(0, random.uniform(0, 8), pixels.shape)
    canvas = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    canvas[:, :width] = np.clip(np.rint(pixels), 0, 255)
    return Line(text, canvas, width)


def normalize(lines: list[Line]) -> np.ndarray:
    """Makes the recogniser's input, N x 3 x HEIGHT x WIDTH: pixels in -1 to 1, 0 behind the line."""
    batch = np.zeros((len(lines), 3, HEIGHT, WIDTH), np.float32)
    for row, line in zip(batch, lines, strict=True):
        row[:, :, : line.width] = line.pixels[:, : line.width].transpose(2, 0, 1) / np.float32(127.5) - 1
    return batch


def _colours(random: np.random.RandomState) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Draws the colours of paper and ink, one light and one dark."""
    light = tuple(int(v) for v in random.randint(170, 256, size=3))
    dark = tuple(int(v) for v in random.randint(0, 90, size=3))
    pair = (light, dark) if random.rand() < 0.75 else (dark, light)
    return pair  # type: ignore[return-value]

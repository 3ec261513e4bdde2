"""Pictures of the lines that float and int8 read differently."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from examples.ocr.fonts import font
from examples.ocr.lines import HEIGHT, WIDTH, Line


def save_lines(file: Path, lines: Sequence[Line], readings: dict[str, Sequence[str]]) -> int:
    """Writes a PNG with each line whose readings differ, and what each network read beside it.

    Args:
        file: the picture to write.
        lines: the lines of text.
        readings: network -> what it read in each line.

    Returns:
        The number of lines whose readings differ.
    """
    differing = [i for i in range(len(lines)) if len({read[i] for read in readings.values()}) > 1]
    face, height = font("DejaVuSansMono.ttf", 13), max(HEIGHT, 16 * len(readings)) + 6
    picture = Image.new("RGB", (2 * WIDTH + 60, max(height * len(differing), height)), "white")
    pen = ImageDraw.Draw(picture)
    for row, index in enumerate(differing):
        pixels = np.ascontiguousarray(lines[index].pixels[:, :, ::-1])
        picture.paste(Image.fromarray(pixels), (0, row * height))
        for place, (name, read) in enumerate(readings.items()):
            ink = "darkgreen" if read[index] == lines[index].text else "darkred"
            pen.text((WIDTH + 8, row * height + 16 * place), f"{name}: {read[index]}", fill=ink, font=face)
    picture.save(file)
    return len(differing)

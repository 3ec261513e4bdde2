"""The fonts that matplotlib brings: one family to calibrate on, another one to judge on."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from PIL import ImageFont

FAMILIES = {
    "calibration": (
        "DejaVuSans.ttf",
        "DejaVuSans-Bold.ttf",
        "DejaVuSans-Oblique.ttf",
        "DejaVuSansMono.ttf",
        "DejaVuSansMono-Bold.ttf",
        "DejaVuSerif.ttf",
        "DejaVuSerif-Bold.ttf",
        "DejaVuSerif-Italic.ttf",
    ),
    "test": (
        "STIXGeneral.ttf",
        "STIXGeneralBol.ttf",
        "STIXGeneralItalic.ttf",
        "STIXGeneralBolIta.ttf",
    ),
}


@lru_cache(maxsize=512)
def font(name: str, size: int) -> ImageFont.FreeTypeFont:
    """Loads a font of matplotlib in a size in pixels."""
    import matplotlib

    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name), size)

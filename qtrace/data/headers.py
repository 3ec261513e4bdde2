"""How large an image says that it is, from its first bytes, before anything is allocated for its pixels."""

from __future__ import annotations

import re
from typing import Literal

__all__ = ["MOST_PIXELS", "dimensions"]

MOST_PIXELS = 2**28
"""268 million pixels, 0.75 GiB in colour; a PNG of a few kilobytes can ask for a thousand times as much."""

# OpenCV ends a comment at a carriage return, too, and a number at any byte: the latter is refused.
_SPACE = rb"\s+(?:#[^\r\n]*[\r\n]\s*)*"
_PNM = re.compile(rb"P[1-6]" + _SPACE + rb"(\d{1,18})" + _SPACE + rb"(\d{1,18})\s")
_MAX_PNM_HEADER_BYTES = 4096
# The segments of a JPEG that begin a frame: SOF0 to SOF15 without DHT (C4), JPG (C8) and DAC (CC).
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_ALONE = frozenset({0x01, *range(0xD0, 0xD8)})  # markers without a length: TEM and restarts


def dimensions(data: bytes) -> tuple[int, int] | None:
    """Height and width as the header of a PNG, JPEG, BMP, WebP or PNM file has them.

    Args:
        data: the whole file.

    Returns:
        None for another kind of file, or one whose header is damaged. A decoder may still read such a
        file, so the caller refuses it.
    """
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return _pair(data, 20, 16, 4, "big")
    if data.startswith(b"\xff\xd8"):
        return _jpeg(data)
    if data.startswith(b"BM"):
        return _bmp(data)
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return _webp(data)
    numbers = _PNM.match(data[:_MAX_PNM_HEADER_BYTES])
    return (int(numbers[2]), int(numbers[1])) if numbers else None


def _pair(
    data: bytes, height: int, width: int, size: int, order: Literal["big", "little"]
) -> tuple[int, int] | None:
    """Two unsigned integers of ``size`` bytes, at the offsets ``height`` and ``width``."""
    if len(data) < max(height, width) + size:
        return None
    first, second = data[height : height + size], data[width : width + size]
    return int.from_bytes(first, order), int.from_bytes(second, order)


def _jpeg(data: bytes) -> tuple[int, int] | None:
    position = 2
    while position + 4 <= len(data):
        if data[position] != 0xFF:
            return None
        marker = data[position + 1]
        if marker == 0xFF:  # a fill byte
            position += 1
        elif marker in _ALONE:
            position += 2
        elif marker in _FRAMES:
            return _pair(data, position + 5, position + 7, 2, "big")
        else:
            position += 2 + int.from_bytes(data[position + 2 : position + 4], "big")
    return None


def _bmp(data: bytes) -> tuple[int, int] | None:
    if int.from_bytes(data[14:18], "little") == 12:  # the header of OS/2
        return _pair(data, 20, 18, 2, "little")
    found = _pair(data, 22, 18, 4, "little")
    if found is None:
        return None
    # Signed: a negative height means that the first row is the upper one.
    height, width = (value - 2**32 if value >= 2**31 else value for value in found)
    return abs(height), abs(width)


def _webp(data: bytes) -> tuple[int, int] | None:
    kind = data[12:16]
    if kind == b"VP8X":
        found = _pair(data, 27, 24, 3, "little")
        return None if found is None else (found[0] + 1, found[1] + 1)
    if kind == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return ((bits >> 14) & 0x3FFF) + 1, (bits & 0x3FFF) + 1
    found = _pair(data, 28, 26, 2, "little")
    return None if found is None else (found[0] & 0x3FFF, found[1] & 0x3FFF)

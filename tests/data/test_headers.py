"""The size of an image by its header: what OpenCV decodes, and claims that are not believed."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from qtrace.config.qconfig import MOST_PIXELS
from qtrace.data.images import decode, dimensions
from qtrace.errors import DataError
from tests.each import each_of

COLOUR = np.random.default_rng(0).integers(0, 256, (7, 301, 3), np.uint8)


def encoded(suffix: str, image: np.ndarray = COLOUR, *options: int) -> bytes:
    return cv2.imencode(suffix, image, list(options))[1].tobytes()


def by_pillow(form: str, mode: str = "RGB", **options: object) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(COLOUR).convert(mode).save(stream, form, **options)
    return stream.getvalue()


WHOLE = {
    "png": encoded(".png"),
    "grey png": encoded(".png", COLOUR[..., 0]),
    "jpeg": encoded(".jpg"),
    "progressive jpeg": encoded(".jpg", COLOUR, cv2.IMWRITE_JPEG_PROGRESSIVE, 1),
    "jpeg with exif": by_pillow("JPEG", exif=b"Exif\0\0" + b"MM\0*\0\0\0\x08\0\0\0\0\0\0"),
    "bmp": encoded(".bmp"),
    "webp": encoded(".webp"),
    "lossless webp": by_pillow("WEBP", lossless=True),
    "webp with alpha": by_pillow("WEBP", "RGBA", exif=b"Exif\0\0"),
    "ppm": encoded(".ppm"),
    "ppm with a comment": encoded(".ppm").replace(b"P6\n", b"P6\n# 5 6\n", 1),
}


@each_of("name", WHOLE)
def test_the_size_is_what_the_decoder_finds(name: str) -> None:
    image = cv2.imdecode(np.frombuffer(WHOLE[name], np.uint8), cv2.IMREAD_UNCHANGED)
    assert dimensions(WHOLE[name]) == image.shape[:2] == (7, 301)


def test_bmp_from_the_top_and_of_os2() -> None:
    turned = bytearray(WHOLE["bmp"])
    turned[22:26] = struct.pack("<i", -7)
    assert dimensions(bytes(turned)) == (7, 301)
    assert dimensions(b"BM" + bytes(12) + struct.pack("<IHHHH", 12, 301, 7, 1, 24)) == (7, 301)


@pytest.mark.parametrize("name", WHOLE)
@given(data=st.data())
def test_image_dimensions_survive_truncation_and_damage(name: str, data: st.DataObject) -> None:
    whole = bytearray(WHOLE[name])
    whole[data.draw(st.integers(0, 40))] = data.draw(st.integers(0, 255))
    assert _is_size_or_none(dimensions(bytes(whole[: data.draw(st.integers(0, 60))])))
    assert _is_size_or_none(dimensions(bytes(whole)))


@given(st.binary(max_size=64))
def test_no_bytes_raise(data: bytes) -> None:
    assert _is_size_or_none(dimensions(data))
    assert _is_size_or_none(dimensions(b"\xff\xd8" + data))


def _is_size_or_none(size: object) -> bool:
    return size is None or (len(size) == 2 and all(type(n) is int and n >= 0 for n in size))  # type: ignore


def png_bomb(width: int, height: int) -> bytes:
    """A PNG of so many black pixels, a bit each, whose rows are missing after the first megabytes."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    body = zlib.compress(bytes(2**20), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def test_a_bomb_is_refused_by_its_header(tmp_path: Path) -> None:
    path = tmp_path / "bomb.png"
    path.write_bytes(png_bomb(2**15, 2**14))
    assert path.stat().st_size < 2000
    assert MOST_PIXELS < 2**29
    with pytest.raises(DataError, match="bomb.png claims 32768 x 16384 pixels, more than 256 million"):
        decode(path, 3)


# Headers that OpenCV reads, in which a reader of the standard finds no size or another one.
LENIENT = {
    "other separators": b"P6\n3)2\n255\n",
    "number ended by a comment": b"P6\n3#2 7\n1\n255\n",
    "comment ended by a carriage return": b"P6\n#\r3 2 255 \n1 1\n255\n",
    "leading zeros": b"P6\n3 " + b"0" * 18 + b"2\n255\n",
    "long comment": b"P6\n#" + b"x" * 5000 + b"\n3 2\n255\n",
}


@each_of("name", LENIENT)
def test_image_dimensions_agree_with_the_decoder(name: str, tmp_path: Path) -> None:
    data = LENIENT[name] + bytes(100)
    image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
    assert image.shape[:2] == (2, 3)
    assert dimensions(data) in (None, (2, 3))
    (tmp_path / "a.ppm").write_bytes(data)
    if dimensions(data) is None:
        with pytest.raises(DataError, match="a.ppm is not an image that qtrace reads .* header is damaged"):
            decode(tmp_path / "a.ppm", 3)


@pytest.mark.parametrize("suffix", [".tiff", ".sr"])
def test_another_kind_of_image_under_a_known_suffix_is_refused(suffix: str, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encoded(suffix))
    with pytest.raises(DataError, match=r"a.png is not an image that qtrace reads \(PNG, JPEG, BMP, WebP"):
        decode(tmp_path / "a.png", 3)


@each_of("kind", ["16 bits", "palette", "wrong suffix"])
def test_kinds_of_pixels_that_are_read(kind: str, tmp_path: Path) -> None:
    palette = io.BytesIO()
    Image.fromarray(COLOUR).convert("P").save(palette, "PNG")
    wide = COLOUR.astype(np.uint16) * 257
    data = {"16 bits": encoded(".png", wide), "palette": palette.getvalue(), "wrong suffix": WHOLE["bmp"]}
    (tmp_path / "a.jpg").write_bytes(data[kind])
    assert dimensions(data[kind]) == (7, 301)
    image = decode(tmp_path / "a.jpg", 3)
    assert image.shape == (7, 301, 3)
    if kind != "palette":
        np.testing.assert_array_equal(image, COLOUR)

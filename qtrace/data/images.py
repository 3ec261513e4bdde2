"""Inputs from a folder of images: decoding, resizing, normalization. Pixels are H x W x C, blue first."""

from __future__ import annotations

import errno
import hashlib
import io
import logging
import math
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from qtrace.config.qconfig import MOST_PIXELS
from qtrace.data.base import Batch, SizedSource, file_identity
from qtrace.errors import DataError, refusing
from qtrace.process import caught_lines

if TYPE_CHECKING:
    from qtrace.config import Preprocess

_MAX_BYTES = 8 * MOST_PIXELS  # larger than any such image, even without compression
_PNG = b"\x89PNG\r\n\x1a\n"
# Prints of libjpeg and libpng that gave up, or filled in pixels. Extra bytes before a marker count, as they
# are mostly the only sign of a flipped bit.
_DAMAGE = ("Corrupt JPEG data: ", "Premature end of JPEG file", "libpng error: ")
# Prints about intact images.
_HARMLESS = (
    "Inconsistent progression sequence",
    "Invalid SOS parameters",
    "Unknown Adobe color transform",
    "Warning: unknown JFIF revision",
    "libpng warning: ",
)


def decode(path: Path, channels: int) -> np.ndarray:
    """Reads an image as uint8 with 1 or 3 channels, upright as its EXIF orientation says.

    Grey becomes three equal channels and colour becomes grey as ``channels`` asks for; transparency is
    dropped; 16-bit values are reduced to 8.

    Raises:
        DataError: when the file is no intact image.
    """
    import cv2  # here: the command line stays fast without it

    if channels not in (1, 3):
        raise DataError(f"preprocess.size asks for {channels} channels; images give 1 or 3.")
    data = _contents(path)
    _check_size(path, data)
    if data.startswith(b"\xff\xd8") and not _is_whole_jpeg(data):
        raise DataError(f"{path} is a truncated JPEG.")
    if data.startswith(_PNG) and not _is_whole_png(data):
        raise DataError(f"{path} is a truncated or damaged PNG.")
    flag = cv2.IMREAD_COLOR if channels == 3 else cv2.IMREAD_GRAYSCALE
    level = cv2.setLogLevel(0)  # which would also print the error below
    try:
        with caught_lines((*_DAMAGE, *_HARMLESS)) as lines:
            image = cv2.imdecode(np.frombuffer(data, np.uint8), flag)
    except (cv2.error, MemoryError, OSError) as error:  # the last: no file handle for the decoder's messages
        reason = getattr(error, "err", None) or getattr(error, "strerror", None) or "out of memory"
        raise DataError(f"{path} cannot be decoded ({reason}).") from error
    finally:
        cv2.setLogLevel(level)
    for line in lines:
        if line.startswith(_DAMAGE):
            raise DataError(f"{path} is a damaged image ({line.rpartition(': ')[2]}).")
    if image is None:
        raise DataError(f"{path} is not an image that OpenCV can decode, or it is damaged.")
    return image.reshape(*image.shape[:2], channels)


def _contents(path: Path) -> bytes:
    """Reads a regular file."""
    with refusing(DataError, path, "read"):
        if path.exists() and not path.is_file():  # a pipe would never end
            raise DataError(f"{path} is not a regular file.")
        if path.stat().st_size > _MAX_BYTES:
            raise DataError(f"{path} has more than {_MAX_BYTES >> 30} GiB: no image to calibrate with.")
        data = path.read_bytes()
    if not data:
        raise DataError(f"{path} is empty.")
    return data


def _check_size(path: Path, data: bytes) -> None:
    """Refuses a file whose header gives no size, or an absurd one, before OpenCV allocates its pixels."""
    size = dimensions(data)
    if size is None:
        raise DataError(
            f"{path} is not an image that qtrace reads (PNG, JPEG, BMP, WebP or PPM), or its header is "
            "damaged."
        )
    if size[0] * size[1] > MOST_PIXELS:
        raise DataError(
            f"{path} claims {size[1]} x {size[0]} pixels, more than {MOST_PIXELS >> 20} million: it is "
            "damaged, or no image to calibrate with."
        )


def _is_whole_png(data: bytes) -> bool:
    """Whether all chunks up to the last have their checksum."""
    position = len(_PNG)
    while position + 12 <= len(data):
        end = position + 8 + int.from_bytes(data[position : position + 4], "big")
        kind = data[position + 4 : position + 8]
        if zlib.crc32(data[position + 4 : end]) != int.from_bytes(data[end : end + 4], "big"):
            return False
        if kind == b"IEND":
            return True
        position = end + 4
    return False


def _is_whole_jpeg(data: bytes) -> bool:
    """Whether an end marker follows the pixels: OpenCV fills a truncated JPEG up with grey."""
    position = 2
    while position + 4 <= len(data) and data[position] == 0xFF:
        marker = data[position + 1]
        if marker == 0xFF:  # a fill byte
            position += 1
            continue
        position += 2 + int.from_bytes(data[position + 2 : position + 4], "big")
        if marker == 0xDA:  # from here on pixels, in which FF D9 cannot occur; an EXIF thumbnail lies before
            return data.find(b"\xff\xd9", position) >= 0
    return False


def fit(image: np.ndarray, preprocess: Preprocess) -> np.ndarray:
    """Resizes or crops an image to the recipe's height and width, in its order of channels."""
    import cv2

    _, height, width = preprocess.size
    target = height, width
    ratios = height / image.shape[0], width / image.shape[1]
    if preprocess.resize == "center_crop":
        ratio = max(ratios) / preprocess.crop_fraction
        target = max(height, round(image.shape[0] * ratio)), max(width, round(image.shape[1] * ratio))
    elif preprocess.resize == "letterbox":
        ratio = min(ratios)
        target = (
            min(height, max(1, round(image.shape[0] * ratio))),
            min(width, max(1, round(image.shape[1] * ratio))),
        )
    if target != image.shape[:2]:
        channels = image.shape[2]
        interpolation = getattr(cv2, f"INTER_{preprocess.interpolation.upper()}")
        image = cv2.resize(image, target[::-1], interpolation=interpolation)
        image = image.reshape(*target, channels)  # OpenCV drops a single channel
    if preprocess.resize == "letterbox":
        image = _fill_up(image, preprocess)
    top, left = (image.shape[0] - height) // 2, (image.shape[1] - width) // 2
    image = image[top : top + height, left : left + width]
    return image[..., ::-1] if preprocess.channels == "rgb" else image


def _fill_up(image: np.ndarray, preprocess: Preprocess) -> np.ndarray:
    """Adds pixels to an image until it has the recipe's height and width."""
    _, height, width = preprocess.size
    rows, columns = height - image.shape[0], width - image.shape[1]
    top, left = (rows // 2, columns // 2) if preprocess.fill_at == "around" else (0, 0)
    around = ((top, rows - top), (left, columns - left), (0, 0))
    return np.pad(image, around, constant_values=preprocess.fill)


def normalize(batch: np.ndarray, preprocess: Preprocess) -> np.ndarray:
    """Computes ``(pixel * scale - mean) / std`` for each channel of N x C x H x W, as float32."""
    channels = batch.shape[1]
    mean, std = (
        np.broadcast_to(np.asarray(value, np.float32).reshape(-1), channels).reshape(1, channels, 1, 1)
        for value in (preprocess.mean, preprocess.std)
    )
    return (batch.astype(np.float32) * np.float32(preprocess.scale) - mean) / std


def are_pixels(dtype: np.dtype[Any], rank: int, preprocess: Preprocess | None) -> bool:
    """Whether an array holds pixels that ``preprocess`` converts: uint8 with four axes."""
    return preprocess is not None and dtype == np.uint8 and rank == 4


def find_pixels(arrays: Sequence[np.ndarray], preprocess: Preprocess) -> int | None:
    """Returns the number of the array of a batch that ``preprocess`` converts; None if there is none.

    It is the first one with four axes and the recipe's channels, if that is uint8. A mask with an image, or
    with one that is normalized already, stays as it is.
    """
    channels, axis = preprocess.size[0], 3 if preprocess.layout == "nhwc" else 1
    for number, array in enumerate(arrays):
        if are_pixels(array.dtype, array.ndim, preprocess):
            if array.shape[axis] == channels or len(arrays) == 1:
                return number
        elif array.ndim == 4 and channels in (array.shape[1], array.shape[axis]):
            return None
    return None


def check_channels(shape: Sequence[int], label: str, preprocess: Preprocess) -> None:
    """Refuses an array of pixels that lacks the recipe's number of channels, or has them elsewhere."""
    channels, last = preprocess.size[0], preprocess.layout == "nhwc"
    if shape[3 if last else 1] == channels:
        return
    axes, other = ("N x H x W x C", "nchw") if last else ("N x C x H x W", "nhwc")
    advice = (
        f"give --layout {other} (preprocess.layout)"
        if shape[1 if last else 3] == channels
        else (f"store pixels as {axes}, or floats that need no preprocessing")
    )
    raise DataError(
        f"{label} holds uint8 pixels of shape {tuple(shape)}, but preprocess.size has {channels} channel(s), "
        f"and its layout is {axes}: {advice}."
    )


def convert(pixels: np.ndarray, preprocess: Preprocess) -> np.ndarray:
    """Converts an array of pixels to an input: N x C x H x W, normalized."""
    if preprocess.layout == "nhwc":
        pixels = np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))
    return normalize(pixels, preprocess)


# OpenCV ends a comment at a carriage return, too, and a number at any byte: the latter is refused.
_SPACE = rb"\s+(?:#[^\r\n]*[\r\n]\s*)*"
_PNM = re.compile(rb"P[1-6]" + _SPACE + rb"(\d{1,18})" + _SPACE + rb"(\d{1,18})\s")
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
    numbers = _PNM.match(data[: io.DEFAULT_BUFFER_SIZE])  # a header is shorter
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
    sizes = _pair(data, 22, 18, 4, "little")
    if sizes is None:
        return None
    # Signed: a negative height means that the first row is the upper one.
    height, width = (value - 2**32 if value >= 2**31 else value for value in sizes)
    return abs(height), abs(width)


def _webp(data: bytes) -> tuple[int, int] | None:
    kind = data[12:16]
    if kind == b"VP8X":
        sizes = _pair(data, 27, 24, 3, "little")
        return None if sizes is None else (sizes[0] + 1, sizes[1] + 1)
    if kind == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return ((bits >> 14) & 0x3FFF) + 1, (bits & 0x3FFF) + 1
    sizes = _pair(data, 28, 26, 2, "little")
    return None if sizes is None else (sizes[0] & 0x3FFF, sizes[1] & 0x3FFF)


_LOG = logging.getLogger("qtrace")

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".ppm")


class ImageSource(SizedSource):
    """Batches of the images below a folder, in the order of their paths."""

    def __init__(
        self,
        folder: Path,
        *,
        preprocess: Preprocess,
        batch_size: int,
        max_batches: int | None,
        skip_bad: bool,
    ) -> None:
        super().__init__(str(folder), max_batches)
        self.pixels = True
        self.cut = not skip_bad  # a bad image makes its batch smaller
        self._images = find_images(folder)
        self._preprocess = preprocess
        self._batch_size = batch_size
        self._skip_bad = skip_bad

    def identity(self) -> str:
        """Returns the folder and a hash of the names, sizes and times of change of its images."""
        names = "".join(f"{p.relative_to(self.source)} {file_identity(p)}\n" for p in self._images)
        return f"{self.source} {hashlib.sha256(names.encode('utf-8', 'surrogateescape')).hexdigest()}"

    def _count(self) -> int:
        return math.ceil(len(self._images) / self._batch_size)

    def _batches(self, selects: Callable[[int], bool]) -> Iterator[tuple[int, Batch]]:
        # A bad image makes its batch smaller. If the next image took its place, each batch would depend on
        # all images before it.
        for number in range(self._count()):
            if not selects(number):
                continue
            start = number * self._batch_size
            rows = [self._row(path, number) for path in self._images[start : start + self._batch_size]]
            images = [row for row in rows if row is not None]
            if images:
                yield number, (normalize(np.stack(images), self._preprocess),)

    def _row(self, path: Path, number: int) -> np.ndarray | None:
        """Reads one image as channels, height, width; None if it is left out."""
        if str(path) in self.skipped:
            return None
        try:
            image = decode(path, self._preprocess.size[0])
        except DataError as error:
            if not self._skip_bad:
                raise DataError(
                    f"batch {number}: {error} Repair or remove it, or leave such images out (skip_bad=True)."
                ) from error
            self.skipped.append(str(path))
            _LOG.warning("left out: %s", error)
            return None
        return np.ascontiguousarray(fit(image, self._preprocess).transpose(2, 0, 1))


def find_images(folder: Path) -> list[Path]:
    """Lists the images in a folder and the folders below it, by suffix, sorted by path.

    Hidden files and folders are left out. A link to a folder inside is not followed, as its images are
    listed already. A link that leaves the folder is refused.

    Raises:
        DataError: when there are none, or a link leads out of the folder.
    """
    root = folder.resolve()
    images = []
    folders = [folder]
    while folders:  # not os.walk: it recurses, and ends at a thousand nested folders
        for entry in _entries(folders.pop()):
            path = Path(entry)
            if entry.name.startswith("."):
                continue
            if entry.is_symlink() and not _target(path).is_relative_to(root):
                raise DataError(f"{path} is a link that leaves {folder}; put the images themselves there.")
            if entry.is_dir():
                folders += [] if entry.is_symlink() else [path]
            elif entry.name.lower().endswith(SUFFIXES):
                images.append(path)
    if not images:
        raise DataError(f"{folder} holds no image; looked for {', '.join(SUFFIXES)}, in its subfolders too.")
    return sorted(images, key=lambda path: path.relative_to(folder).as_posix())


def _target(path: Path) -> Path:
    """Resolves a link."""
    try:
        return path.resolve()
    except (OSError, RuntimeError) as error:  # Python raises RuntimeError for a circle
        raise DataError(f"{path} is a link that leads nowhere; remove it.") from error


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise DataError(
                f"{str(folder)[:60]}... cannot be read: its folders are nested too deep."
            ) from error
        raise DataError(f"{error.filename} cannot be read: {error.strerror}.") from error

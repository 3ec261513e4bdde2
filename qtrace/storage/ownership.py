"""Which files qtrace wrote: each carries a mark, in a place that its format has for that.

A file without the mark may be the only copy of a network, so that commands and `qtrace.export` replace it
only if they are asked to.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

__all__ = ["WRITTEN", "foreign", "foreign_output"]

WRITTEN = "Written by qtrace"
"""The mark of text files, which stands in a comment of one of the first lines."""

_HEAD = 1024  # bytes
_TEXT_MARKS = (
    WRITTEN.encode(),
    b'<meta name="generator" content="qtrace">',
    b'"producer": "qtrace"',
    b'"schema": "qtrace-costs/',
)
_PRODUCER, _METADATA = 2, 14  # fields of ONNX' ModelProto
_MAX_FIELD = 1 << 16  # bytes of a producer's name or of an entry of metadata up to its key


def foreign(path: Path) -> str:
    """Says that ``path`` is a file which qtrace did not write.

    Args:
        path: the file that is about to be replaced.

    Returns:
        The beginning of a sentence; "" where there is no regular file, for an empty one, and for one that
        carries the mark of qtrace.

    Raises:
        OSError: when the file cannot be read.
    """
    if not path.is_file() or path.stat().st_size == 0 or _is_own(path):
        return ""
    return f"{path} exists, and nothing in it says that qtrace wrote it"


def foreign_output(path: Path, beside: Iterable[Path] = ()) -> str:
    """Says which file of an output of several files qtrace did not write.

    Raw weights and other files next to the named one lack a place for a mark. They belong to qtrace if the
    named file does.

    Args:
        path: the file that the user named, and that is about to be replaced.
        beside: the other files of the output.

    Returns:
        As `foreign`.

    Raises:
        OSError: when a file cannot be read.
    """
    reason = foreign(path)
    if reason or (path.is_file() and path.stat().st_size > 0):
        return reason
    return next((reason for other in beside if (reason := foreign(other))), "")


def _is_own(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(_HEAD)
        if head[:1] == b"\x80":  # a pickle: a pickle of `qtrace.save` begins with its checksum
            return b"qtrace" in head[:16]
        if head[4:8] == b"TFL3":
            return _tflite_description(file).startswith(b"qtrace")
        if head[8:12] == b"mgv2":
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return data.rfind(b'{"qtrace": 1,') >= 0
        if head.startswith(b"7767517\n"):
            return b"\nInput qtrace/" in head
        if any(mark in head for mark in _TEXT_MARKS):
            return True
        if head[:1] == b"{":  # a document of MSC, whose readers accept no other entries than theirs
            prototxt = path.with_suffix(".prototxt")
            return path != prototxt and prototxt.is_file() and _is_own(prototxt)
        return any(_names_qtrace(number, value) for number, value in _onnx_fields(file))


def _names_qtrace(number: int, value: bytes) -> bool:
    """Whether a field of an ONNX model is the producer qtrace, or an entry of its metadata."""
    return value == b"qtrace" if number == _PRODUCER else value[2:].startswith(b"qtrace.")


def _onnx_fields(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yields producer and metadata of an ONNX file, without reading its graph; nothing of other files."""
    size = file.seek(0, 2)
    file.seek(0)
    while file.tell() < size:
        tag = _varint(file)
        length = _varint(file)
        if tag & 7 == 0:  # a number, which has been read
            continue
        if tag & 7 != 2 or file.tell() + length > size:
            return
        if tag >> 3 in (_PRODUCER, _METADATA):
            position = file.tell()
            yield tag >> 3, file.read(min(length, _MAX_FIELD))
            file.seek(position)
        file.seek(length, 1)


def _varint(file: BinaryIO) -> int:
    number = shift = 0
    while byte := file.read(1):
        number |= (byte[0] & 127) << shift
        shift += 7
        if byte[0] < 128 or shift > 63:
            break
    return number


def _tflite_description(file: BinaryIO) -> bytes:
    """Returns the description of a TFLite model, or nothing."""

    def number(form: str, position: int) -> int:
        file.seek(position)
        value: int = struct.unpack(form, file.read(struct.calcsize(form)))[0]
        return value

    try:
        root = number("<I", 0)
        table = root - number("<i", root)
        offset = number("<H", table + 10) if number("<H", table) > 10 else 0  # the fourth field
        if not offset:
            return b""
        text = root + offset + number("<I", root + offset)
        return file.read(min(number("<I", text), _HEAD))
    except (struct.error, ValueError):
        return b""

"""Length and checksum of a model file, at its head: damage is told, and no number is wrong in silence.

The head is a pickle program of its own that leaves nothing behind: it pushes bytes and takes them off
again, so that ``megengine.load`` reads past it. Files of ``megengine.save`` have none. It is no signature:
who changes a file can make a new one.
"""

from __future__ import annotations

import contextlib
import pickle
import struct
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

from qtrace.graph.files.names import DamagedError

__all__ = ["SIZE", "check_seal", "sealing"]

_NUMBERS = struct.Struct("<QI")  # length and CRC-32 of what follows
_MARK = b"qtrace"
_BEGIN = pickle.PROTO + b"\x04" + pickle.SHORT_BINBYTES + bytes([len(_MARK) + _NUMBERS.size]) + _MARK
_LIKE = 3  # bytes of the eight behind the protocol; a pickle without a head shares one at most
SIZE = len(_BEGIN) + _NUMBERS.size + len(pickle.POP)


class _Counting:
    """A file that is written to, with the length and the checksum of what was written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.length = self.checksum = 0

    def write(self, data: Any) -> None:
        """Writes bytes, or what pickle hands over in their place."""
        self.checksum = zlib.crc32(data, self.checksum)
        self.length += memoryview(data).nbytes
        self._file.write(data)


@contextlib.contextmanager
def sealing(file: BinaryIO) -> Iterator[Any]:
    """Gives what to write a pickle to; when that is whole, ``file`` begins with its head.

    Args:
        file: open for writing, at its beginning, and able to seek.
    """
    file.write(bytes(SIZE))
    body = _Counting(file)
    yield body
    file.seek(0)
    file.write(_BEGIN + _NUMBERS.pack(body.length, body.checksum) + pickle.POP)
    file.seek(0, 2)


def check_seal(data: Any) -> int:
    """Returns the position at which the pickle of a model begins: after the head, if there is one.

    A damaged head is not taken for none.

    Args:
        data: the whole file, ``bytes`` or an ``mmap``.

    Raises:
        DamagedError: when the file is not as it was written.
    """
    if data[: len(_BEGIN)] != _BEGIN:
        if sum(have == want for have, want in zip(data[2 : len(_BEGIN)], _BEGIN[2:], strict=False)) >= _LIKE:
            raise DamagedError("it is damaged: its first bytes are not quite those that qtrace.save writes")
        return 0
    head = data[len(_BEGIN) : SIZE]
    if len(head) < SIZE - len(_BEGIN):
        raise DamagedError("it is cut short")
    length, checksum = _NUMBERS.unpack_from(head)
    if len(data) != SIZE + length:
        how = "cut short" if len(data) < SIZE + length else "damaged"
        raise DamagedError(f"it is {how}: it has {len(data)} bytes of {SIZE + length}")
    with memoryview(data) as view, view[SIZE:] as body:
        actual = zlib.crc32(body)
    if actual != checksum or head[-1:] != pickle.POP:
        raise DamagedError("it is damaged: its bytes are not those that were written")
    return SIZE

"""Messages between a process and its workers: pickled objects, each after its length.

Both ends are programs of qtrace, the pipe is only theirs.
"""

from __future__ import annotations

import pickle
from typing import IO, Any

__all__ = ["read_message", "write_message"]

_LENGTH_BYTES = 8


def write_message(stream: IO[bytes], value: Any) -> None:
    """Writes an object, at once."""
    data = pickle.dumps(value)
    stream.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)
    stream.flush()


def read_message(stream: IO[bytes]) -> Any:
    """Reads an object.

    Args:
        stream: a pipe, buffered or not.

    Raises:
        EOFError: when the stream ends before the object does.
    """
    return pickle.loads(_read(stream, int.from_bytes(_read(stream, _LENGTH_BYTES), "big")))


def _read(stream: IO[bytes], size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = stream.read(size - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)

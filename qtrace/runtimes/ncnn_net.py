"""Reads the ends of an ncnn net from its ``.param``."""

from __future__ import annotations

from pathlib import Path

from qtrace.errors import ExportError

__all__ = ["read_blobs", "read_index_inputs"]

# The layers that give integers: Quantize, and a convolution whose scales (8=) include its result's scale.
_ROUNDING, _INTEGER = "Quantize", ("8=101", "8=102")


def read_blobs(path: Path) -> tuple[list[str], list[str], list[str]]:
    """Reads the names of the inputs, of the outputs and of the integer blobs, in the order of the file.

    Args:
        path: the ``.param``.

    Raises:
        ExportError: when the file is no ncnn net.
    """
    try:
        magic, _, *lines = path.read_text(encoding="utf-8").splitlines()
    except (UnicodeDecodeError, ValueError) as error:
        raise ExportError(f"{path} is not an ncnn net: {error}.") from error
    if magic.strip() != "7767517":
        raise ExportError(f"{path} is not an ncnn net: it does not begin with 7767517.")
    inputs, tops, integers, read = [], [], [], set()
    for line in lines:
        kind, _, bottoms, count, *words = line.split()
        first = int(bottoms)
        read.update(words[:first])
        outputs = words[first : first + int(count)]
        tops += outputs
        if kind == "Input":
            inputs += outputs
        elif kind == _ROUNDING or any(word in _INTEGER for word in words):
            integers += outputs
    return inputs, [t for t in tops if t not in read and t not in integers], integers


def read_index_inputs(path: Path) -> list[str]:
    """Reads the names of the inputs that ncnn reads as integers: the inputs of embeddings.

    Args:
        path: the ``.param`` of an ncnn net.
    """
    inputs: set[str] = set()
    sources: dict[str, list[str]] = {}
    read: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines()[2:]:
        kind, _, bottoms, tops, *words = line.split()
        first = int(bottoms)
        outputs = words[first : first + int(tops)]
        sources.update(dict.fromkeys(outputs, words[:first]))
        inputs.update(outputs if kind == "Input" else ())
        read += words[:first] if kind == "Embed" else []
    found: list[str] = []
    for blob in read:  # it may be copied or get other axes on the way
        while blob not in inputs and len(sources[blob]) == 1:
            (blob,) = sources[blob]
        found += [blob] if blob in inputs else []
    return list(dict.fromkeys(found))

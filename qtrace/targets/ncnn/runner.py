"""Times ncnn nets, ``.param`` and ``.bin``, on CPU with the options that ncnn has by default.

ncnn checks little of a net and of the sizes of its inputs, so that it runs, and reads the clock, in a child.
The ends of a net are read from its ``.param``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from qtrace.benchmarking.runners import Load, RunnerSettings, random_values
from qtrace.errors import ExportError
from qtrace.runtimes.child import RuntimeChild

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
    for kind, bottoms, outputs, params in map(_read_layer, lines):
        read.update(bottoms)
        tops += outputs
        if kind == "Input":
            inputs += outputs
        elif kind == _ROUNDING or not params.isdisjoint(_INTEGER):
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
    for kind, bottoms, outputs, _ in map(_read_layer, path.read_text(encoding="utf-8").splitlines()[2:]):
        sources.update(dict.fromkeys(outputs, bottoms))
        inputs.update(outputs if kind == "Input" else ())
        read += bottoms if kind == "Embed" else []
    indices: list[str] = []
    for blob in read:  # it may be copied or get other axes on the way
        while blob not in inputs and len(sources[blob]) == 1:
            (blob,) = sources[blob]
        indices += [blob] if blob in inputs else []
    return list(dict.fromkeys(indices))


def _read_layer(line: str) -> tuple[str, list[str], list[str], set[str]]:
    """Returns the kind, the bottoms, the tops and the parameters of a layer."""
    kind, _, bottoms, tops, *words = line.split()
    first, last = int(bottoms), int(bottoms) + int(tops)
    return kind, words[:first], words[first:last], {*words[last:]}


class NcnnRunner:
    """A net with inputs; a run computes the samples of a batch one by one."""

    in_thread = False

    def __init__(self, path: Path, settings: RunnerSettings) -> None:
        weights = path.with_suffix(".bin")
        if not weights.is_file():
            raise ExportError(f"{weights} does not exist: it belongs next to {path.name}.")
        inputs, outputs, _ = read_blobs(path)
        indices = read_index_inputs(path)
        shapes = [_shape(name, settings) for name in inputs]
        child = RuntimeChild("ncnn", "ncnn", path, settings.host)
        self._file, _ = child.open(
            param=child.place(path),
            bin=child.place(weights),
            optimize=True,
            threads=settings.threads,
            light=True,
            inputs=inputs,
            outputs=outputs,
            indices=indices,
        )
        dtypes = (np.int32 if name in indices else np.float32 for name in inputs)
        pairs = zip(shapes, dtypes, strict=True)
        self._file.run([random_values(shape, np.dtype(dtype)) for shape, dtype in pairs])
        self.side = child.side if settings.host is not None else {}
        self.samples = next((shape[0] for shape in shapes if shape), 1)

    def run(self) -> float:
        """Runs the net once and returns the seconds that it took."""
        return self._file.time()

    def memory(self) -> int:
        """Returns the bytes that the net added to the child process at most."""
        return self._file.memory()


def _shape(name: str, settings: RunnerSettings) -> tuple[int, ...]:
    """Returns the shape of an input, which a net does not store."""
    if name not in settings.shapes:
        raise ExportError(
            f"an ncnn net lacks shapes: give the shape of input {name!r}, as in --shape {name}=1x3x224x224."
        )
    return settings.shapes[name]


LOAD = Load("ncnn", "ncnn", "ncnn", (".param",), NcnnRunner)

"""A file that a runtime has loaded in an interpreter of its own: it gives outputs, and the time of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qtrace.runtimes.files import RuntimeChild, RuntimeFile
from qtrace.runtimes.host import RuntimeHost
from qtrace.verification.runtimes.litert import LitertSession
from qtrace.verification.runtimes.ncnn import NcnnSession

__all__ = ["Side", "load", "take_turns"]

_PLAIN_NCNN = ("use_fp16_packed", "use_fp16_storage", "use_fp16_arithmetic")


class Side:
    """A loaded file.

    Args:
        child: the process that has loaded it.
        file: the file there.
        lay_out: gives the arrays that the file takes for a batch.
        options: what a run takes besides.
        read: gives the values of the graph for the outputs of the file; None where they are alike.
    """

    def __init__(
        self,
        child: RuntimeChild,
        file: RuntimeFile,
        lay_out: Callable[[np.ndarray], np.ndarray],
        read: Callable[[list[np.ndarray]], list[np.ndarray]] | None = None,
        **options: Any,
    ) -> None:
        self._file, self._lay_out, self._read, self._options = file, lay_out, read, options
        self.version, self.processor = str(child.side["version"]), str(child.side["processor"])

    def run(self, batch: np.ndarray) -> list[np.ndarray]:
        """Returns the outputs for a batch, in the layout of the graph."""
        inputs = np.ascontiguousarray(self._lay_out(batch))
        outputs = self._file.run([inputs], **self._options)
        return outputs if self._read is None else self._read(outputs)

    def time(self) -> float:
        """Runs the file again on its last batch and returns the seconds."""
        return self._file.time()


def load(runtime: str, path: Path, exact: Path, host: RuntimeHost | None, plain: bool = False) -> Side:
    """Loads a file for one thread.

    Args:
        runtime: the runtime.
        path: the file.
        exact: the float file that qtrace wrote, which says how inputs and outputs are laid out.
        host: the interpreter that has the runtime.
        plain: whether ncnn computes in 32 bits alone.
    """
    child = RuntimeChild(runtime, runtime, path, host)
    if runtime == "litert":
        return _litert(child, path, exact)
    if runtime == "ncnn":
        return _ncnn(child, path, plain)
    if runtime == "openvino":
        config = {
            "INFERENCE_PRECISION_HINT": "f32",
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": "1",
        }
        file, _ = child.open(path=child.place(path), config=config, reshape=True)
        return Side(child, file, lambda batch: batch)
    file, facts = child.open(path=child.place(path), optimize=True, threads=1, entries={})
    feeds, names = ([value["name"] for value in facts[end]] for end in ("inputs", "outputs"))
    return Side(child, file, lambda batch: batch, feeds=feeds, names=names)


def _litert(child: RuntimeChild, path: Path, exact: Path) -> Side:
    orders = LitertSession(exact, True, child.host).facts
    content = np.fromfile(path, np.uint8)
    file, facts = child.open([content], fuse=True, threads=1)
    (source,) = facts["inputs"]

    def lay_out(batch: np.ndarray) -> np.ndarray:
        return _rounded(batch.transpose(orders["inputs"][0]), source)

    def read(outputs: list[np.ndarray]) -> list[np.ndarray]:
        values = [_floats(v, d) for v, d in zip(outputs, facts["outputs"], strict=True)]
        return [v.transpose(np.argsort(o)) for v, o in zip(values, orders["outputs"], strict=True)]

    return Side(child, file, lay_out, read)


def _rounded(values: np.ndarray, detail: dict[str, Any]) -> np.ndarray:
    """Rounds values to the grid of an input; those of a float input stay."""
    kind, (scale, zero_point) = np.dtype(detail["dtype"]), detail["quantization"]
    if kind.kind != "i" or not scale:
        return values
    info = np.iinfo(kind)
    return np.clip(np.rint(values / np.float32(scale)) + zero_point, info.min, info.max).astype(kind)


def _floats(values: np.ndarray, detail: dict[str, Any]) -> np.ndarray:
    scale, zero_point = detail["quantization"]
    if values.dtype.kind != "i" or not scale:
        return values
    return np.float32(scale) * (values.astype(np.float32) - zero_point)


def _ncnn(child: RuntimeChild, path: Path, plain: bool) -> Side:
    names = NcnnSession(path, True, child.host)
    file, _ = child.open(
        param=child.place(path),
        bin=child.place(path.with_suffix(".bin")),
        optimize=True,
        threads=1,
        light=True,
        options=dict.fromkeys(_PLAIN_NCNN, False) if plain else {},
        inputs=names.input_names,
        outputs=names.output_names,
    )
    return Side(child, file, lambda batch: batch)


def take_turns(sides: Sequence[Side], batch: np.ndarray, turns: int) -> list[list[float]]:
    """Returns the times of each file, one a turn; every other turn goes backwards."""
    for side in sides:
        side.run(batch)
        side.time()
    times: list[list[float]] = [[] for _ in sides]
    for number in range(turns):
        order = range(len(sides))
        for index in order if number % 2 == 0 else reversed(order):
            runs = max(1, min(10, int(0.01 / max(times[index][-1], 1e-6)))) if times[index] else 1
            times[index].append(sorted(sides[index].time() for _ in range(runs))[runs // 2])
    return times

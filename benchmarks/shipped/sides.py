"""A file that a runtime has loaded in an interpreter of its own: it gives outputs, and the time of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qtrace.benchmarking.runners import rotate_order
from qtrace.runtimes.child import RuntimeChild, RuntimeFile
from qtrace.runtimes.host import RuntimeHost
from qtrace.targets.ncnn.runtime import NcnnSession
from qtrace.targets.tflite.runtime import LitertSession

__all__ = ["Side", "load", "run_interleaved", "take_rounds"]

_SETTLING, _TIMED = 0.02, 0.01  # seconds of the runs of a turn that do not count, and of those that do
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
        self._child = child
        self.version, self.processor = str(child.side["version"]), str(child.side["processor"])

    def run(self, batch: np.ndarray) -> list[np.ndarray]:
        """Returns the outputs for a batch, in the layout of the graph."""
        inputs = np.ascontiguousarray(self._lay_out(batch))
        outputs = self._file.run([inputs], **self._options)
        return outputs if self._read is None else self._read(outputs)

    def time(self) -> float:
        """Runs the file again on its last batch and returns the seconds."""
        return self._file.time()

    def close(self) -> None:
        """Ends the process."""
        self._child.close()


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


def run_interleaved(sides: Sequence[Side], batch: np.ndarray, turns: int) -> list[list[float]]:
    """Returns the times of each file, one a turn.

    The first runs after those of another file are slower: ResNet-18 at 96x96 took 2.9 ms at first and
    1.4 ms from the sixth run on. So a turn begins with runs that do not count, and no file runs in two
    turns in a row: in turns forwards and backwards those at both ends did, and looked faster.
    """
    for side in sides:
        side.run(batch)
        side.time()
    times: list[list[float]] = [[] for _ in sides]
    for number in range(turns):
        for index in rotate_order(len(sides), number):
            runs = _runs_in(_SETTLING, sides[index].time())
            for _ in range(runs - 1):
                sides[index].time()
            runs = _runs_in(_TIMED, times[index][-1]) if times[index] else 1
            times[index].append(sorted(sides[index].time() for _ in range(runs))[runs // 2])
    return times


def _runs_in(seconds: float, run: float) -> int:
    """Returns how many runs fit into a time, from 1 to 10."""
    return max(1, min(10, int(seconds / max(run, 1e-6))))


def take_rounds(
    openers: Sequence[Callable[[], Side]], batch: np.ndarray, turns: int, starts: int
) -> list[list[list[float]]]:
    """Returns the times of each file in every start, one a turn.

    Where the memory of a process lies makes it some percent faster or slower for as long as it lives. So each
    start loads the files anew, another one first.

    Args:
        openers: what loads each file in a process of its own.
        batch: what the files run on.
        turns: the turns of a start.
        starts: how often the files are loaded.
    """
    rounds = []
    for start in range(starts):
        order = [(start + number) % len(openers) for number in range(len(openers))]
        sides = {index: openers[index]() for index in order}
        times = dict(zip(order, run_interleaved([sides[i] for i in order], batch, turns), strict=True))
        rounds.append([times[index] for index in range(len(openers))])
        for side in sides.values():
            side.close()
    return rounds

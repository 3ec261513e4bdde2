"""The verdict once more, on the finished file beside the float file, and on more samples.

The graph is judged on the few samples that were held back, as its interpreter is slow. Heavy tails, rare
events and a soft-argmax that jumps show on more of them. The samples of the calibration are among those: a
file that has lost something on them has lost it on others, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qtrace.data.base import Batch, batch_length
from qtrace.data.whole import filled_batches
from qtrace.errors import QtraceError
from qtrace.graph.types import TracedModule
from qtrace.onnxfile.local_session import LocalSession
from qtrace.outputs import find_groups
from qtrace.outputs.selections import reaching
from qtrace.process.together import Together
from qtrace.quantizing.evaluation import MOST_VALUES, count_values, shorten
from qtrace.quantizing.file_runs import FileRuns, input_values, open_runs, run_batch
from qtrace.quantizing.float_file import FloatFile
from qtrace.runtimes.host import RuntimeHost
from qtrace.sensitivity.diagnosis import (
    JudgedOutputs,
    find_repeated,
    find_single_numbers,
    judge_outputs,
)
from qtrace.sensitivity.diagnosis.samples import ENOUGH_SAMPLES
from qtrace.sensitivity.diagnosis.verdict import Verdict
from qtrace.sensitivity.metrics import Outputs

__all__ = ["judge_file", "open_for_verdict"]

# Counts of samples and values, not a time: the verdict is the same on a busy machine.
_MOST_SAMPLES = 64  # which show heavy tails and rare events that eight miss
_MOST_OUTPUTS = 1 << 26  # values of either file, which are kept


def open_for_verdict(
    path: Path,
    converted: TracedModule,
    backend: str,
    host: RuntimeHost | None = None,
    size: int | None = None,
) -> Callable[[Sequence[Batch]], Outputs] | None:
    """Returns what runs a file in the place of its graph for the verdict: it is what users get, and faster.

    Args:
        path: the file, which `verify` has passed.
        converted: the graph that it was exported from.
        backend: the name of the backend that it is for.
        host: the interpreter or machine that has the runtime; None for this one.
        size: the number of samples that the file takes alone; None if it takes any.

    Returns:
        A function from batches to the outputs of each; None where onnxruntime does not run the file here,
        where the file takes one number of samples alone, and where rows are selected, as it does not tell
        their places.
    """
    if host is not None or size is not None or any(reaching(converted)):
        return None
    try:
        session = open_runs(path, converted, backend)
    except (QtraceError, ImportError):
        return None
    if not isinstance(session, LocalSession):
        return None

    def run(batches: Sequence[Batch]) -> Outputs:
        return [
            run_batch(session, input_values(converted, batch, number)) for number, batch in enumerate(batches)
        ]

    return run


def judge_file(
    path: Path,
    converted: TracedModule,
    twin: FloatFile,
    batches: Iterable[Batch],
    host: RuntimeHost | None = None,
    size: int | None = None,
) -> Verdict | None:
    """Returns the verdict on a file beside the float file of its network.

    Args:
        path: the file.
        converted: the graph that it was exported from.
        twin: the network in float.
        batches: the samples, those that were held back first; up to 64 are read.
        host: the interpreter or machine that has the runtime; None for this one.
        size: the number of samples that the file takes alone; None if it takes any.

    Returns:
        The verdict; None where rows are selected, whose places a file does not tell, and where no runtime
        here runs the file.
    """
    if any(reaching(converted)) or (host is not None and host.runner):
        return None
    try:
        own = open_runs(path, converted, twin.config.backend, host)
        return _judge(own, twin, list(_cut(batches, twin.traced, size)), host)
    except (QtraceError, ImportError):  # `verify` says what is wrong with a file that does not run
        return None


def _judge(
    own: FileRuns, twin: FloatFile, batches: Sequence[Batch], host: RuntimeHost | None
) -> Verdict | None:
    if not batches:
        return None
    traced = twin.traced
    inputs = [input_values(traced, batch, number) for number, batch in enumerate(batches)]
    counts = [batch_length(batch) for batch in batches]
    # A run takes one thread, so runs go beside each other, and beside MegEngine, which writes the float file
    # in this thread; other runtimes may take all cores.
    with Together(None if isinstance(own, LocalSession) else 1) as together:
        calls: list[Callable[[], Any]] = [
            lambda: open_runs(twin.path, twin.converted, twin.config.backend, host),
            lambda: _run_all(own, inputs, counts),
        ]
        exact, outputs = together.run(calls)
        reference = together.map(functools.partial(run_batch, exact), inputs[: len(outputs)])
    batches = batches[: len(reference)]
    compared = JudgedOutputs(
        find_groups(traced, reference),
        reference,
        outputs,
        counts[: len(reference)],
        find_repeated(batches),
        bool(find_single_numbers(batches)),
    )
    return judge_outputs(compared, "samples, those of the calibration too")


def _run_all(
    file: FileRuns, inputs: Sequence[Sequence[np.ndarray]], counts: Sequence[int]
) -> list[list[np.ndarray]]:
    """Returns the outputs of a file for batches, up to a number of values that are kept.

    Args:
        file: the file.
        inputs: the inputs of each batch.
        counts: the number of samples of each batch.
    """
    outputs: list[list[np.ndarray]] = []
    samples = values = 0
    for feeds, count in zip(inputs, counts, strict=True):
        outputs.append(run_batch(file, feeds))
        samples, values = samples + count, values + sum(v.size for v in outputs[-1])
        if values > _MOST_OUTPUTS and samples >= ENOUGH_SAMPLES:
            break
    return outputs


def _cut(batches: Iterable[Batch], traced: TracedModule, size: int | None) -> Iterator[Batch]:
    """Yields batches of `_MOST_SAMPLES` samples together, fewer if they are large, of the size of a file."""
    samples = values = 0
    for number, batch in enumerate(batches):
        count = max(batch_length(batch), 1)
        fitting = (MOST_VALUES - values) * count // max(count_values(batch), 1)
        most = min(_MOST_SAMPLES - samples, max(fitting, ENOUGH_SAMPLES - samples))
        if most <= 0:
            return
        shortened = shorten(batch, traced, number, most) if count > most else batch
        samples, values = samples + batch_length(shortened), values + count_values(shortened)
        yield from [shortened] if size is None else filled_batches(shortened, size)

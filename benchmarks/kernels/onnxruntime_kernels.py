"""Times the cases of a cost table in onnxruntime, in short rounds that take turns.

The profile of onnxruntime says how the time of a run is shared among its nodes, but writing it slows each
node down. Each case therefore runs with the profile, for the shares, and without it, for the whole time.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import TypeAlias

import numpy as np

from benchmarks.kernels import graphs
from benchmarks.kernels.cases import Case, Slot, feeds
from qtrace.benchmarking.profile import NodeRun, ProfiledSession
from qtrace.costs import FLOAT, Measurement, OpShape
from qtrace.onnxfile.local_session import SessionSettings
from qtrace.onnxfile.sessions import open_session

__all__ = ["PASSES", "measure_cases", "measure_run"]

# Cases that take turns: together they push each other's weights out of the nearest cache, as a network does.
_TOGETHER = 8
PASSES = 2
"""How often all cases are timed: other work that lasts a while disturbs one pass only."""
_MOST_ROUNDS, _LEAST_ROUNDS = 80, 6
_SECONDS_PER_CASE = 0.08
_MOST_SECONDS = 300.0  # then the last pass ends
_KEPT_BYTES = 2**24  # of a file that need not be written again for the second pass
_BEST = 3  # rounds whose times count: those in which other work disturbed least

_MOST_WRITING = 3.5e-6  # that the profile adds to a node
_LEAST_SECONDS = 3e-7  # of a node

_INTEGER_OPS = ("QLinear", "QGemm", "MatMulInteger", "ConvInteger", "QMoE")
_INTEGER_TYPES = ("uint8", "int8")
_ONE_THREAD = SessionSettings(threads=1)
_File: TypeAlias = "tuple[bytes, dict[str, tuple[int, ...]]]"  # and its inputs


def measure_run() -> float:
    """Returns the seconds that a run takes besides its nodes, from two short networks."""
    values = {"x": np.zeros((1, 16), np.float32)}
    times = dict.fromkeys((1, 11), 1.0)
    sessions = {count: open_session(_row(count).write_onnx()[0], _ONE_THREAD) for count in times}
    for _ in range(300):
        for count, session in sessions.items():
            start = time.thread_time()
            session.run(None, values)
            times[count] = min(times[count], time.thread_time() - start)
    return max(times[1] - (times[11] - times[1]) / 10, 0.0)


def _row(count: int) -> Case:
    op = OpShape("sigmoid", ((1, 16),), ((1, 16),))
    return Case({"": (functools.partial(graphs.in_a_row, count=count), op)}, FLOAT)


def measure_cases(
    cases: Sequence[Case], per_run: float = 0.0, progress: Callable[[int], None] = lambda _: None
) -> list[Measurement]:
    """Returns the time of each slot that runs in the form that its case wants.

    Args:
        cases: the networks to time.
        per_run: the seconds that a run takes besides its nodes; see `measure_run`.
        progress: called with the number of networks that were timed, each of them twice.
    """
    best: dict[tuple[OpShape, str], float] = {}
    files: dict[int, _File] = {}
    end = time.perf_counter() + _MOST_SECONDS
    for number in range(PASSES):
        for batch in _batches(list(enumerate(cases))):
            if number and time.perf_counter() > end:
                break
            written = {index: files.get(index) or case.write_onnx() for index, case in batch}
            files.update({index: file for index, file in written.items() if len(file[0]) <= _KEPT_BYTES})
            measured = _measure_batch([(case, written[index]) for index, case in batch], per_run)
            for measurement in _merge(measured):
                key = (measurement.op, measurement.form)
                best[key] = min(measurement.seconds, best.get(key, measurement.seconds))
            progress(len(batch))
    return [Measurement(op, form, seconds) for (op, form), seconds in best.items()]


def _merge(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Returns one measurement for each op and form: the median over one shape."""
    times: dict[tuple[OpShape, str], list[float]] = {}
    for measurement in measurements:
        times.setdefault((measurement.op, measurement.form), []).append(measurement.seconds)
    return [Measurement(op, form, statistics.median(values)) for (op, form), values in times.items()]


def _batches(cases: Sequence[tuple[int, Case]]) -> Iterator[list[tuple[int, Case]]]:
    rest = iter(cases)
    while batch := list(islice(rest, _TOGETHER)):
        yield batch


class _Running:
    """A case with a session that is profiled and one that is not, and the times of their runs."""

    def __init__(self, case: Case, file: _File) -> None:
        self.case = case
        model, inputs = file
        self._profiled, self._plain = ProfiledSession(model), open_session(model, _ONE_THREAD)
        self._feeds = feeds(inputs)
        self._times: list[float] = []  # processor time, without the turns of other programs
        self.spent = 0.0

    def run(self) -> None:
        """Runs both sessions once."""
        begin = time.thread_time()
        self._profiled.run(self._feeds)
        start = time.thread_time()
        self._plain.run(None, self._feeds)
        end = time.thread_time()
        self._times.append(end - start)
        self.spent += end - begin

    def finish(self, per_run: float) -> list[Measurement]:
        """Returns the times of the slots."""
        runs = self._profiled.finish()[1:]
        whole = statistics.fmean(sorted(self._times)[:_BEST]) - per_run
        return _read_times(self.case, _share_out(runs, whole))


def _share_out(runs: Sequence[Sequence[NodeRun]], whole: float) -> list[NodeRun]:
    """Returns the nodes of a run with their shares of the time that they take without the profile.

    Args:
        runs: the nodes of some profiled runs.
        whole: the time of a run without the profile.
    """
    best = [
        statistics.fmean(sorted(node.seconds for node in same)[:_BEST]) for same in zip(*runs, strict=True)
    ]
    writing = min(max((sum(best) - whole) / len(best), 0.0), _MOST_WRITING)
    kernels = [max(seconds - writing, _LEAST_SECONDS) for seconds in best]
    factor = max(whole, _LEAST_SECONDS) / sum(kernels)
    return [replace(node, seconds=k * factor) for node, k in zip(runs[0], kernels, strict=True)]


def _measure_batch(cases: Sequence[tuple[Case, _File]], per_run: float) -> list[Measurement]:
    running = [_Running(case, file) for case, file in cases]
    for number in range(_MOST_ROUNDS):
        for each in running:
            if number < _LEAST_ROUNDS or each.spent < _SECONDS_PER_CASE * len(each.case.parts):
                each.run()
    return [measurement for each in running for measurement in each.finish(per_run)]


def _read_times(case: Case, nodes: Sequence[NodeRun]) -> list[Measurement]:
    """Returns the time of each slot whose nodes run in its form."""
    measurements = []
    for slot in case.slots:
        own = [node for node in nodes if node.name.startswith(slot.prefix)]
        if own and (slot.form == FLOAT or _on_integers(slot, own)):
            seconds = sum(node.seconds for node in own) / (len(own) if slot.each else 1)
            measurements.append(Measurement(slot.op, slot.form, seconds))
    return measurements


def _on_integers(slot: Slot, nodes: Sequence[NodeRun]) -> bool:
    """Whether the op runs in integer kernels; a linear layer may add its bias in float."""
    integers = [_is_integer(node) for node in nodes]
    return any(integers) if slot.op.kind == "linear" else all(integers)


def _is_integer(node: NodeRun) -> bool:
    return node.op.startswith(_INTEGER_OPS) or (bool(node.inputs) and node.inputs[0][0] in _INTEGER_TYPES)

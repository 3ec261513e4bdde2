"""Several devices: statistics and ranges of the ranks of ``megengine.distributed`` become common to all.

MegEngine lacks data parallelism on CPU, where the tests run: they use a collective of two ranks that is not
MegEngine's. `MegEngineCollective` itself never ran.
"""

from __future__ import annotations

import json
from typing import Protocol

import numpy as np
from megengine import Tensor

from qtrace.calibration.algorithms import Part, fingerprint, merge_parts, pack, unpack
from qtrace.calibration.collecting import Statistics
from qtrace.errors import CalibrationError, QtraceError
from qtrace.graph.types import TracedModule
from qtrace.preparation.model import QuantizedModel, fake_quants
from qtrace.scheme import QParams


class Collective(Protocol):
    """Ranks that make the same calls in the same order."""

    @property
    def rank(self) -> int:
        """The number of this process."""

    @property
    def size(self) -> int:
        """The number of processes."""

    def gather(self, data: bytes) -> list[bytes]:
        """Returns the data of all ranks, in their order, to every rank."""


class MegEngineCollective:
    """The world of ``megengine.distributed``."""

    @property
    def rank(self) -> int:
        """The number of this process."""
        import megengine.distributed as dist

        return int(dist.get_rank())

    @property
    def size(self) -> int:
        """The number of processes."""
        import megengine.distributed as dist

        return int(dist.get_world_size())

    def gather(self, data: bytes) -> list[bytes]:
        """Gathers the lengths, then the bytes as int32, padded to the longest."""
        lengths = self._all_gather(np.array([len(data)], np.int32))
        words = -(-int(lengths.max()) // 4)
        padded = np.frombuffer(data.ljust(4 * words, b"\0"), np.int32)
        rows = self._all_gather(padded).reshape(len(lengths), words)
        return [row.tobytes()[:length] for row, length in zip(rows, lengths, strict=True)]

    @staticmethod
    def _all_gather(values: np.ndarray) -> np.ndarray:
        import megengine.distributed as dist

        return np.asarray(dist.functional.all_gather(Tensor(values)).numpy())


def current() -> Collective | None:
    """Returns the ranks of ``megengine.distributed``; None if it is not initialized or has one rank."""
    import megengine.distributed as dist

    return MegEngineCollective() if dist.is_distributed() and dist.get_world_size() > 1 else None


def common_statistics(
    prepared: QuantizedModel, outcome: Statistics | QtraceError, collective: Collective
) -> Statistics:
    """Merges the statistics of all ranks. A rank that failed fails all, so that none waits.

    Batches must have unique numbers: ``rank + index * size``.

    Args:
        prepared: the graph, the same on every rank.
        outcome: the statistics of this rank, or its error.
        collective: the ranks.

    Returns:
        The merged statistics, the same on every rank.

    Raises:
        CalibrationError: when a rank failed or has another model; it names the rank.
    """
    identity = fingerprint(prepared)
    failed = isinstance(outcome, QtraceError)
    packed = b"" if isinstance(outcome, QtraceError) else pack(Part(outcome), identity)
    header = json.dumps({"failed": str(outcome) if failed else "", "identity": identity}).encode()
    answers = [json.loads(answer) for answer in collective.gather(header)]
    for rank, answer in enumerate(answers):
        if answer["failed"]:
            raise CalibrationError(f"rank {rank}: {answer['failed']}")
        if answer["identity"] != answers[0]["identity"]:
            raise CalibrationError(f"rank {rank} has another model than rank 0: load one file on every rank.")
    whole = None
    for rank, data in enumerate(collective.gather(packed)):
        part = unpack(data, prepared, identity, f"the statistics of rank {rank}")
        whole = part if whole is None else merge_parts(whole, part)
    assert whole is not None
    return whole.statistics


def average_ranges(prepared: TracedModule, collective: Collective | None = None) -> None:
    """Gives every rank the mean scales of all ranks, in float32, and the zero points of rank 0.

    An all-reduce callback on the gradients of learned scales keeps these equal. Loops that reduce gradients
    at intervals, or not the gradients of scales, need this function.

    Args:
        prepared: a calibrated module; changed in place.
        collective: the ranks; None for the ranks of ``megengine.distributed``, if it is initialized.
    """
    ranks = current() if collective is None else collective
    sites = [fq for fq in fake_quants(prepared) if fq.calibrated]
    if ranks is None or not sites:
        return
    scales = [fq.effective_scale().numpy().reshape(-1) for fq in sites]
    zero_points = [fq.effective_zero_point().numpy().reshape(-1) for fq in sites]
    flat = np.concatenate([*scales, *zero_points]).astype(np.float32)
    table = np.stack([np.frombuffer(data, np.float32) for data in ranks.gather(flat.tobytes())])
    half = flat.size // 2
    mean = table[:, :half].astype(np.float64).mean(axis=0).astype(np.float32)
    first_zero_points = table[0, half:]
    ends = np.cumsum([scale.size for scale in scales])[:-1]
    splits = np.split(mean, ends), np.split(first_zero_points, ends)
    for fq, scale, zero_point in zip(sites, *splits, strict=True):
        shape = (-1,) if fq.shape else ()
        fq.set_qparams(QParams(fq.scheme, scale.reshape(shape), zero_point.reshape(shape).astype(np.int32)))

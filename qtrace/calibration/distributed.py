"""Many devices: what each rank of ``megengine.distributed`` observed or learned becomes common to all.

This machine has no second device, and MegEngine has no data parallelism on CPU: the logic is tested with a
collective of two ranks that is not MegEngine's; `MegEngineCollective` itself has not run.
"""

from __future__ import annotations

import json
from typing import Protocol

import numpy as np
from megengine import Tensor

from qtrace.calibration.checkpoint import Part, fingerprint, joined, pack, unpack
from qtrace.calibration.statistics import Statistics
from qtrace.errors import CalibrationError, QtraceError
from qtrace.graph.types import TracedModule
from qtrace.preparation.model import QuantizedModel
from qtrace.preparation.record import fake_quants
from qtrace.scheme import QParams

__all__ = ["Collective", "MegEngineCollective", "average_ranges", "common_statistics", "current"]


class Collective(Protocol):
    """Ranks that call the same things in the same order."""

    @property
    def rank(self) -> int:
        """The number of this process."""

    @property
    def size(self) -> int:
        """How many processes there are."""

    def gather(self, data: bytes) -> list[bytes]:
        """What every rank gives, in the order of ranks; each rank gets all."""


class MegEngineCollective:
    """The world of ``megengine.distributed``."""

    @property
    def rank(self) -> int:
        """The number of this process."""
        import megengine.distributed as dist

        return int(dist.get_rank())

    @property
    def size(self) -> int:
        """How many processes there are."""
        import megengine.distributed as dist

        return int(dist.get_world_size())

    def gather(self, data: bytes) -> list[bytes]:
        """Sends lengths, then bytes as int32, filled up to the longest."""
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
    """The ranks of this process, None when ``megengine.distributed`` is not initialised or has one."""
    import megengine.distributed as dist

    return MegEngineCollective() if dist.is_distributed() and dist.get_world_size() > 1 else None


def common_statistics(
    prepared: QuantizedModel, outcome: Statistics | QtraceError, collective: Collective
) -> Statistics:
    """The statistics of all ranks, the same on each. A rank that failed fails all, so that none waits.

    Batches must have numbers of their own: ``rank + index * size``.

    Args:
        prepared: the graph, alike on every rank.
        outcome: what this rank collected, or why it could not.
        collective: the ranks.

    Raises:
        CalibrationError: when a rank failed, naming it, or has another model.
    """
    identity = fingerprint(prepared)
    failed = isinstance(outcome, QtraceError)
    mine = b"" if isinstance(outcome, QtraceError) else pack(Part(outcome), identity)
    head = json.dumps({"failed": str(outcome) if failed else "", "identity": identity}).encode()
    answers = [json.loads(answer) for answer in collective.gather(head)]
    for rank, answer in enumerate(answers):
        if answer["failed"]:
            raise CalibrationError(f"rank {rank}: {answer['failed']}")
        if answer["identity"] != answers[0]["identity"]:
            raise CalibrationError(f"rank {rank} has another model than rank 0: load one file on every rank.")
    whole = None
    for rank, data in enumerate(collective.gather(mine)):
        part = unpack(data, prepared, identity, f"what rank {rank} observed")
        whole = part if whole is None else joined(whole, part)
    assert whole is not None
    return whole.statistics


def average_ranges(prepared: TracedModule, collective: Collective | None = None) -> None:
    """Gives every rank the mean of the scales that ranks apply, in float32; zero points become rank 0's.

    Learned scales are parameters: with an all-reduce callback on their gradients they stay alike by
    themselves. This is for loops that reduce gradients only now and then, or not those of scales.

    Args:
        prepared: a calibrated module; changed in place.
        collective: the ranks; None for those of ``megengine.distributed``, if it is initialised.
    """
    ranks = current() if collective is None else collective
    sites = [fq for fq in fake_quants(prepared) if fq.calibrated]
    if ranks is None or not sites:
        return
    scales = [fq.effective_scale().numpy().reshape(-1) for fq in sites]
    zeros = [fq.effective_zero_point().numpy().reshape(-1) for fq in sites]
    flat = np.concatenate([*scales, *zeros]).astype(np.float32)
    table = np.stack([np.frombuffer(data, np.float32) for data in ranks.gather(flat.tobytes())])
    half = flat.size // 2
    mean = table[:, :half].astype(np.float64).mean(axis=0).astype(np.float32)
    zero = table[0, half:]
    ends = np.cumsum([scale.size for scale in scales])[:-1]
    for fq, scale, point in zip(sites, np.split(mean, ends), np.split(zero, ends), strict=True):
        shape = (-1,) if fq.shape else ()
        fq.set_qparams(QParams(fq.scheme, scale.reshape(shape), point.reshape(shape).astype(np.int32)))

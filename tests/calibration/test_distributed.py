"""Ranks: the logic of `qtrace.calibration.distributed` with two ranks that take turns in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import megengine as mge
import numpy as np
import pytest

import qtrace
from qtrace.calibration import calibrate, distributed
from qtrace.calibration.distributed import MegEngineCollective, average_ranges
from qtrace.errors import CalibrationError
from qtrace.graph.types import TracedModule
from qtrace.preparation.model import fake_quants
from tests.each import each_of
from tests.nets import Chain, images

_BATCHES = [images(2, 3, 8, 8, seed=i) * (i + 1) for i in range(4)]


class _NotYet(Exception):
    """The other rank must give its part first."""


class _Rank:
    """One of two ranks. A call that the other has not answered yet ends the rank's turn."""

    size = 2

    def __init__(self, rank: int, given: list[dict[int, bytes]]) -> None:
        self.rank, self.given, self.calls = rank, given, 0

    def gather(self, data: bytes) -> list[bytes]:
        if self.calls == len(self.given):
            self.given.append({})
        answers = self.given[self.calls]
        self.calls += 1
        answers[self.rank] = data
        if len(answers) < 2:
            raise _NotYet
        return [answers[0], answers[1]]


def _in_turns(work: Callable[[_Rank], Any]) -> list[Any]:
    """What both ranks give; each is begun anew until no call waits. MegEngine has but one thread."""
    given: list[dict[int, bytes]] = []
    results: dict[int, Any] = {}
    for turn in range(20):
        rank = turn % 2
        if rank not in results:
            try:
                results[rank] = work(_Rank(rank, given))
            except CalibrationError as error:
                results[rank] = error
            except _NotYet:
                continue
    return [results[0], results[1]]


def _traced() -> TracedModule:
    return qtrace.trace(Chain(2, 3), _BATCHES[0], check=False)


def _calibrated(
    traced: TracedModule, batches: list[Any], rank: _Rank | None, patch: pytest.MonkeyPatch
) -> TracedModule:
    with patch.context() as inside:
        inside.setattr(calibrate, "current", lambda: rank)
        rule = {"match": {"position": "first"}, "observers": {"activation": "moving_average"}}
        config = {"observers": {"activation": "mse"}, "rules": [rule]}
        return qtrace.calibrate(qtrace.prepare(traced, config), batches, progress=False)


def test_two_ranks_calibrate_as_one_that_sees_all(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = _traced()
    alone = _calibrated(traced, _BATCHES, None, monkeypatch)
    both = _in_turns(lambda rank: _calibrated(traced, _BATCHES[rank.rank :: 2], rank, monkeypatch))
    for model in both:
        for mine, wanted in zip(fake_quants(model), fake_quants(alone), strict=True):
            np.testing.assert_array_equal(mine.qparams().scale, wanted.qparams().scale, err_msg=mine.site)
            assert mine.observer is not None
            assert wanted.observer is not None
            assert mine.observer.state_dict()["batches"] == wanted.observer.state_dict()["batches"]


def test_a_rank_that_fails_fails_both(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = _traced()
    data = [[_BATCHES[0]], [_BATCHES[1] * np.nan]]
    for error in _in_turns(lambda rank: _calibrated(traced, data[rank.rank], rank, monkeypatch)):
        assert isinstance(error, CalibrationError)
        assert str(error).startswith("rank 1: batch 1 holds NaN")


def test_ranks_with_different_weights_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [_traced(), _traced()]
    for error in _in_turns(lambda r: _calibrated(models[r.rank], _BATCHES, r, monkeypatch)):
        assert "rank 1 has another model than rank 0" in str(error)


def test_learned_ranges_become_their_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"qat": {"fakequant": "lsq"}}
    traced = _traced()
    models = [qtrace.calibrate(qtrace.prepare(traced, config), _BATCHES, progress=False) for _ in range(2)]
    before = [fq.effective_scale().numpy().astype(np.float64) for fq in fake_quants(models[0])]
    for fq in fake_quants(models[1]):
        fq.scale._reset(mge.Parameter(fq.scale.numpy() * -3))  # one that crossed zero
    _in_turns(lambda rank: average_ranges(models[rank.rank], rank))
    for model in models:
        for fq, old in zip(fake_quants(model), before, strict=True):
            np.testing.assert_allclose(fq.scale.numpy(), 2 * old, rtol=1e-6)
    average_ranges(models[0])  # without ranks nothing happens


@each_of("lengths", [(3, 8), (0, 5), (4, 4)])
def test_bytes_of_any_length_are_sent_as_integers(
    monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, int]
) -> None:
    data = [bytes(range(1, n + 1)) for n in lengths]
    words = -(-max(lengths) // 4)

    def all_gather(values: np.ndarray) -> np.ndarray:
        assert values.dtype == np.int32
        if values.size == 1 and not sent:
            sent.append(values)
            return np.array(lengths, np.int32)
        return np.concatenate([np.frombuffer(d.ljust(4 * words, b"\0"), np.int32) for d in data])

    sent: list[np.ndarray] = []
    monkeypatch.setattr(MegEngineCollective, "_all_gather", staticmethod(all_gather))
    assert MegEngineCollective().gather(data[0]) == data


def test_no_distributed_group_by_default() -> None:
    assert distributed.current() is None

"""Columns of small values count in the loss and in the figures as much as those of large ones."""

from typing import Any

import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.comparing.runs import outputs_of
from qtrace.comparing.sums import sqnr_db
from qtrace.extras.finetune import FinetuneSettings
from qtrace.extras.finetune.evaluation import _Noise, choose_compared
from tests.nets import net

_RNG = np.random.default_rng(0)
_PACKED = _RNG.normal(size=(8, 30, 85)) * np.repeat([640.0, 0.4], [4, 81])


class _Arrays:
    """An engine whose graphs give these arrays."""

    def __init__(self, reference: np.ndarray, value: np.ndarray) -> None:
        self.reference, self.value = reference, value

    def run_teacher(self, batch: Any) -> Any:
        return [self.reference], {}

    def run_student(self, batch: Any) -> Any:
        return [self.value], {}


@pytest.mark.parametrize("columns", [slice(0, 4), slice(4, 85)])
def test_loss_and_error_weigh_column_groups_equally(columns: slice) -> None:
    value = _PACKED.copy()
    value[..., columns] *= 1.1  # noise of 1 % of the power of one group
    compared = choose_compared(_Arrays(_PACKED, value), [], [None, None])
    loss = np.mean((value - _PACKED) ** 2 * compared.weights[0])
    assert loss == pytest.approx(0.01 / 2, rel=1e-4)
    noise = _Noise(compared.groups)
    noise.add(_PACKED, value, False)
    assert noise.relative_to(compared.outputs[0]) == pytest.approx(0.01 / 2, rel=1e-4)
    assert noise.sqnr_db == pytest.approx(20.0, abs=0.01)


def test_an_output_of_one_quantity_has_no_weights() -> None:
    compared = choose_compared(_Arrays(_PACKED[..., 4:], _PACKED[..., 4:]), [], [None])
    assert compared.weights == {}
    assert [group.whole for group in compared.groups] == [True]


def test_packed_columns_are_no_classes() -> None:
    rows = _PACKED.reshape(-1, 85)
    assert choose_compared(_Arrays(rows, rows), [], [None]).classes == ()
    assert choose_compared(_Arrays(rows[:, 4:], rows[:, 4:]), [], [None]).classes == (0,)


@pytest.mark.quick(1)
@pytest.mark.parametrize("jit", [False, True])
def test_the_report_has_the_worst_columns(jit: bool) -> None:
    def forward(self: Any, x: Any) -> Any:
        y = F.relu(self.a(x))
        return F.concat([self.boxes(y) * 1000, self.scores(y)], axis=1)

    layers = {"boxes": M.Conv2d(6, 2, 1), "scores": M.Conv2d(6, 3, 1)}
    batches = [_RNG.normal(size=(8, 3, 4, 4)).astype(np.float32) for _ in range(4)]
    traced = qtrace.trace(net(forward, a=M.Conv2d(3, 6, 1), **layers), batches[0], check=False)
    config = {"backend": "generic", "weight": {"bits": 3}, "activation": {"bits": 4}}
    rules = [
        {"match": {"name": ["boxes", "scores"]}, "quantize_output": False},
        {"match": {"op": ["mul", "concat"]}, "quantize": False},
    ]
    prepared = qtrace.prepare(traced, {**config, "rules": rules})
    qtrace.calibrate(prepared, batches, progress=False)
    settings = FinetuneSettings(steps=20, batch_size=8, lr=0.02, jit=jit, evaluate_every=20)
    report = qtrace.finetune(prepared, batches, settings, evaluation=batches[:2], progress=False)
    qtrace.set_phase(prepared, "quantize")
    exact, rounded = (outputs_of(model, batches[:2]) for model in (traced, prepared))
    f, q = (np.concatenate([v for (v,) in values]) for values in (exact, rounded))
    ratios = [sqnr_db(f[:, part], q[:, part]) for part in (slice(0, 2), slice(2, 5))]
    assert report.outputs[0].after == pytest.approx(min(ratios), abs=0.01)
    assert report.error_after == pytest.approx(np.mean(10 ** (-np.array(ratios) / 10)), rel=0.05)
    assert report.error_after < report.error_before

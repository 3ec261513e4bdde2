"""GPTQ: against Optimal Brain Surgeon written out, and what it does to a graph."""

from __future__ import annotations

from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace import QConfig, QParams, QScheme, ops
from qtrace.errors import ConfigError
from qtrace.graph.walk import exprs
from qtrace.numerics import fake_quantize
from qtrace.ops import OpCall
from qtrace.preparation.model import read_record
from qtrace.ptq.layers import second_order
from qtrace.ptq.layers import statistics as collecting
from qtrace.ptq.layers.second_order import grouped, nearest, parts, rounded, rounded_groups
from qtrace.ptq.layers.statistics import draw_positions, read_rows, result_rows
from tests.nets import images, left_lines, net

SCHEME = QScheme(bits=3, signed=True, symmetric=True, narrow=True, axis=0, rounding="half_even")
BATCHES = [images(2, 4, 8, 8, seed=s) for s in range(2)]


def _case(rows: int, inputs: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, QParams]:
    random = np.random.RandomState(seed)
    x = random.randn(6 * inputs, inputs) @ random.randn(inputs, inputs)
    weight = random.randn(rows, inputs)
    scale = (np.abs(weight).max(axis=1) / 3).astype(np.float32)
    return weight, x.T @ x, QParams(SCHEME, scale, np.zeros(rows, np.int32))


def _run(weight: np.ndarray, hessian: np.ndarray, qparams: QParams, damp: float = 0.01) -> np.ndarray:
    scale = qparams.scale.astype(np.float64)[:, None]
    hessians = [hessian[p, p] for p in parts(len(hessian))]
    return rounded(weight, hessians, scale, np.zeros_like(scale), qparams, damp)


def _written_out(weight: np.ndarray, hessian: np.ndarray, qparams: QParams, damp: float) -> np.ndarray:
    """Optimal Brain Surgeon with a fresh inverse for every column."""
    damped = hessian + damp * np.trace(hessian) / len(hessian) * np.eye(len(hessian))
    left = list(np.argsort(-np.diagonal(hessian), kind="stable"))
    weight, result = weight.copy(), np.zeros_like(weight)
    while left:
        inverse = np.linalg.inv(damped[np.ix_(left, left)])
        first = left[0]
        result[:, first] = fake_quantize(weight[:, first : first + 1], qparams)[:, 0]
        error = weight[:, first] - result[:, first]
        weight[:, left] -= np.outer(error, inverse[0] / inverse[0, 0])
        left = left[1:]
    return result


@pytest.mark.parametrize("block", [3, 128])
def test_gptq_equals_optimal_brain_surgeon(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(second_order, "_BLOCK_COLUMNS", block)
    for seed in range(5):
        case = _case(4, 10, seed)
        np.testing.assert_allclose(_run(*case), _written_out(*case, damp=0.01), atol=1e-6)


def test_wide_layers_are_rounded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, hessian, qparams = _case(4, 10)
    alone = [_run(weight[:, p], hessian[p, p], qparams) for p in (slice(0, 6), slice(6, 10))]
    monkeypatch.setattr(second_order, "MAX_JOINT_INPUTS", 6)
    np.testing.assert_array_equal(_run(weight, hessian, qparams), np.concatenate(alone, axis=1))


def test_the_quadratic_error_falls_and_uncorrelated_inputs_change_nothing() -> None:
    weight, hessian, qparams = _case(16, 20)
    near = fake_quantize(weight, qparams)

    def error(other: np.ndarray) -> float:
        return float(np.einsum("oi,ij,oj->", weight - other, hessian, weight - other))

    assert error(_run(weight, hessian, qparams)) < 0.5 * error(near)
    np.testing.assert_allclose(_run(weight, np.diag(np.arange(1.0, 21.0)), qparams), near, atol=1e-6)
    np.testing.assert_allclose(_run(weight, np.zeros((20, 20)), qparams), near, atol=1e-6)


def test_nearest_rounding_uses_the_zero_point() -> None:
    scheme = SCHEME.replace(signed=False, symmetric=False, narrow=False)
    qparams = QParams(scheme, np.array([0.5, 0.25], np.float32), np.array([2, 5], np.int32))
    rows = np.random.RandomState(0).randn(2, 30)
    actual = nearest(rows, qparams.scale[:, None].astype(np.float64), qparams.zero_point[:, None], qparams)
    np.testing.assert_allclose(actual, fake_quantize(rows, qparams))


def test_short_rows_of_all_groups_have_more_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A depthwise layer of many channels reads as much at a position as a layer of long rows."""
    asked: list[int] = []

    def draw(size: int, places: int, seed: tuple[int, ...]) -> np.ndarray:
        asked.append(places)
        return draw_positions(size, places, seed)

    monkeypatch.setattr(collecting, "draw_positions", draw)
    layers = {
        "short": M.Conv2d(4, 32, 3, padding=1),  # 36 inputs
        "depthwise": M.Conv2d(32, 32, 3, padding=1, groups=32),  # 9 of each of 32 groups
        "pairs": M.Conv2d(32, 8, 1, groups=4),  # 8 of each of 4 groups
        "long": M.Conv2d(8, 4, 7, padding=3),  # 392
    }
    module = net(lambda self, x: self.long(self.pairs(self.depthwise(self.short(x)))), **layers)
    ptq = ["fuse_bn", {"gptq": {"places": 4}}]
    prepared = qtrace.prepare(
        qtrace.trace(module, BATCHES[0], check=False), {"placement": "everything", "ptq": ptq}
    )
    qtrace.calibrate(prepared, BATCHES[:1], progress=False)
    assert sorted(asked) == [4 * 1, 4 * 1, 4 * 7, 4 * 8]  # threads draw them


@pytest.mark.parametrize(
    ("count", "last", "groups", "places"),
    [(2, 2, 1, 54), (6, 2, 1, 18), (7, 2, 1, 16), (6, 1, 1, 18), (2, 2, 3, 18), (6, 2, 3, 6)],
)
def test_more_samples_have_fewer_positions_each(
    monkeypatch: pytest.MonkeyPatch, count: int, last: int, groups: int, places: int
) -> None:
    """8 rows for each of 27 inputs, of all samples, are 216; of each of 3 groups, 72 for 9 inputs.

    Samples of a short last batch have as many.
    """
    asked: list[int] = []

    def draw(size: int, places: int, seed: tuple[int, ...]) -> np.ndarray:
        asked.append(places)
        return draw_positions(size, places, seed)

    monkeypatch.setattr(collecting, "draw_positions", draw)
    monkeypatch.setattr(collecting, "_LEAST_ROWS", 1)
    batches = [images(2, 3, 20, 20, seed=number) for number in range(count)]
    batches[-1] = batches[-1][:last]
    module = net(lambda self, x: self.layer(x), layer=M.Conv2d(3, 6, 3, groups=groups))
    config = {"placement": "everything", "ptq": ["gptq"]}
    prepared = qtrace.prepare(qtrace.trace(module, batches[0], check=False), config)
    qtrace.calibrate(prepared, batches, progress=False)
    assert asked == [places] * count


@pytest.mark.parametrize(
    ("groups", "kernel", "settings"),
    [
        (1, (3, 3), {"padding": 1, "stride": 2}),
        (2, (3, 2), {"padding": (2, 1)}),
        (4, (3, 3), {"dilation": 2}),
    ],
)
@pytest.mark.parametrize("places", [9, 1000])
def test_rows_are_the_windows_of_a_convolution(groups: int, kernel: Any, settings: Any, places: int) -> None:
    conv = M.Conv2d(4, 4, kernel, groups=groups, bias=False, **settings)
    x = np.random.RandomState(0).randn(2, 4, 9, 8).astype(np.float32)
    out, weight = conv(mge.Tensor(x)).numpy(), conv.weight.numpy()
    positions = draw_positions(out.shape[2] * out.shape[3], places, (3, 1))
    read = read_rows(x, _call_of(conv, x), weight.shape, positions)
    expected = result_rows(out, 1, groups, positions)
    actual = read @ grouped(weight).transpose(0, 2, 1)
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_positions_are_drawn_one_in_each_part_and_the_same_again() -> None:
    np.testing.assert_array_equal(draw_positions(7, 7, (0,)), np.arange(7))
    drawn = draw_positions(103, 10, (5, 2))
    edges = np.arange(11) * 103 // 10
    assert ((edges[:-1] <= drawn) & (drawn < edges[1:])).all()
    np.testing.assert_array_equal(drawn, draw_positions(103, 10, (5, 2)))
    assert not np.array_equal(drawn, draw_positions(103, 10, (6, 2)))


def test_groups_are_rounded_at_once_as_one_by_one() -> None:
    cases = [_case(2, 9, seed) for seed in range(4)]
    weight, hessian = (np.stack([case[i] for case in cases]) for i in (0, 1))
    hessian[3] = 0  # a dead group
    scale = np.concatenate([case[2].scale for case in cases])
    qparams = QParams(SCHEME, scale, np.zeros(8, np.int32))
    grid = (scale.astype(np.float64)[:, None], np.zeros((8, 1)), qparams)
    together = rounded_groups(weight, hessian, grid, 0.01)
    for i, part in enumerate(weight):
        rows = slice(2 * i, 2 * i + 2)
        alone = rounded(part, [hessian[i]], grid[0][rows], grid[1][rows], qparams, 0.01)
        np.testing.assert_allclose(together[i], alone, atol=1e-9)


def _call_of(conv: M.Module, x: np.ndarray) -> OpCall:
    prepared = qtrace.prepare(qtrace.trace(conv, x, check=False), {"backend": "generic"})
    return next(c for e in exprs(prepared) if (c := ops.read(e)) is not None and c.kind == "conv2d")


def _calibrated(*ptq: Any) -> Any:
    module = net(
        lambda self, x: self.d(F.relu(self.c(F.relu(self.b(F.relu(self.a(x))))))),
        a=M.Conv2d(4, 6, 3, padding=1),
        b=M.Conv2d(6, 6, 3, padding=1, groups=6),
        c=M.ConvTranspose2d(6, 4, 2),
        d=M.Conv2d(4, 4, 3),
    )
    config = QConfig(backend="generic", weight={"bits": 3, "axis": 0}, ptq=ptq)
    traced = qtrace.trace(module, BATCHES[0], check=False)
    return qtrace.calibrate(qtrace.prepare(traced, config), BATCHES, progress=False)


def test_layers_gain_and_weights_lie_on_their_grids() -> None:
    plain, learned = _calibrated(), _calibrated("gptq")
    report = read_record(learned).ptq[-1]
    assert [e["site"] for e in report["errors"]] == ["a_out", "b_out", "d_out"]
    assert all(e["after"] >= e["before"] for e in report["errors"])
    assert report["errors"][0]["after"] > report["errors"][0]["before"] + 1.0
    assert "c_out: weights of conv_transpose2d are rounded to nearest" in left_lines(report)
    for name in "abd":
        quant, weight = getattr(learned.qsites, f"{name}_weight"), getattr(learned, name).weight
        if f"{name}_out" not in " ".join(left_lines(report)):
            np.testing.assert_allclose(quant(weight).numpy(), weight.numpy(), atol=1e-6)
        before = getattr(plain.qsites, f"{name}_weight").qparams().scale
        np.testing.assert_array_equal(quant.qparams().scale, before)


@pytest.mark.parametrize(
    ("ptq", "message"),
    [
        (["bias_correction", "gptq"], "put gptq before bias_correction"),
        (["adaround", "gptq"], "roundings are"),
    ],
)
def test_wrong_orders_of_algorithms_are_refused(ptq: list[str], message: str) -> None:
    traced = qtrace.trace(net(lambda self, x: self.a(x), a=M.Conv2d(4, 4, 1)), BATCHES[0], check=False)
    with pytest.raises(ConfigError, match=message):
        qtrace.prepare(traced, QConfig(ptq=ptq))

"""The packaged cost table is fitted to another processor by a dozen kernels, once."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace

import numpy as np
import pytest

from qtrace.benchmarking import fitting
from qtrace.benchmarking.cases import conv
from qtrace.benchmarking.fitting import ProcessorFit
from qtrace.benchmarking.load import OtherWork
from qtrace.costs import FLOAT, INTEGER, INTEGER_7, CostTable, Measurement, OpShape

TABLE = CostTable.load("onnxruntime")
CONV = OpShape("conv2d", ((1, 64, 28, 28),), ((1, 64, 28, 28),), (64, 64, 3, 3), (1, 1))
OTHER_CONV = OpShape("conv2d", ((1, 32, 56, 56),), ((1, 32, 56, 56),), (32, 32, 3, 3), (1, 1))
ADD = OpShape("add", ((1, 64, 28, 28),) * 2, ((1, 64, 28, 28),))


def _times(op: OpShape, form: str, factor: float) -> Measurement:
    seconds = TABLE.seconds(op, form)
    assert seconds is not None
    return Measurement(op, form, seconds * factor)


def test_a_class_is_scaled_by_the_mean_of_its_kernels_in_each_form() -> None:
    measured = [_times(CONV, INTEGER, 2.0), _times(OTHER_CONV, INTEGER, 8.0), _times(ADD, FLOAT, 100.0)]
    factors = fitting.fit(TABLE, measured)
    means = {key: trend.at(CONV) for key, trend in factors.items()}
    assert means == pytest.approx({("conv", INTEGER): 4.0, ("elementwise", FLOAT): 10.0})
    scaled = fitting.scale(TABLE, factors, TABLE.machine)
    for op, form, factor in (
        (CONV, INTEGER, 4.0),
        (CONV, FLOAT, 1.0),
        (ADD, INTEGER, 1.0),
        (ADD, FLOAT, 10.0),
    ):
        assert scaled.seconds(op, form) == pytest.approx(factor * TABLE.seconds(op, form), rel=1e-6)


def _conv(channels: int, size: int, kernel: int = 1) -> OpShape:
    shape = (1, channels, size, size)
    return OpShape("conv2d", (shape,), (shape,), (channels, channels, kernel, kernel), (1, 1))


def test_the_factor_of_many_convolutions_depends_on_their_size() -> None:
    """Twice as much for each quadrupled map: a size between is met, and one beyond has the last factor."""
    sizes = ((16, 7), (64, 14), (128, 28), (256, 14), (32, 56), (64, 7))
    measured = [_times(_conv(c, n), INTEGER, n / 7) for c, n in sizes]
    factors = fitting.fit(TABLE, measured)
    trend = factors["conv", INTEGER]
    for channels, size, factor in ((48, 28, 4.0), (512, 14, 2.0), (16, 3, 1.0), (16, 112, 8.0)):
        assert trend.at(_conv(channels, size)) == pytest.approx(factor, rel=1e-6)
    fitted = ProcessorFit(TABLE.machine, factors)
    assert ProcessorFit.from_dict(json.loads(json.dumps(fitted.to_dict()))) == fitted
    earlier = {**fitted.to_dict(), "factors": {"max_pool2d, plain, float": 3.0}}
    assert ProcessorFit.from_dict(earlier).factors["max_pool2d, plain", "float"].at(CONV) == pytest.approx(
        3.0
    )


def test_weights_of_7_bits_have_times_of_their_own() -> None:
    """Where products saturate: the kernels of 8 bits take 4 times what the table says, those of 7 twice."""
    seven = replace(_times(CONV, INTEGER, 2.0), form=INTEGER_7)
    factors = fitting.fit(TABLE, [_times(CONV, INTEGER, 4.0), seven, _times(ADD, INTEGER, 3.0)])
    machine = replace(TABLE.machine, processor="another")
    fitted = ProcessorFit(machine, factors)
    fitted = ProcessorFit.from_dict(json.loads(json.dumps(fitted.to_dict())))
    assert fitted.gains_by_fewer_bits
    for op, bits, factor in ((CONV, 8, 4.0), (CONV, 7, 2.0), (CONV, 4, 2.0), (ADD, 7, 3.0)):
        seconds = fitted.table(bits).seconds(op, INTEGER)
        assert seconds == pytest.approx(factor * TABLE.seconds(op, INTEGER), rel=1e-6)
    assert not ProcessorFit(machine, fitting.fit(TABLE, [_times(CONV, INTEGER, 4.0)])).gains_by_fewer_bits


@pytest.mark.parametrize("saturate", [True, False])
def test_weights_of_7_bits_are_timed_where_products_saturate(monkeypatch, saturate: bool) -> None:
    monkeypatch.setattr(fitting, "products_saturate", lambda: saturate)
    cases = fitting._cases()
    assert [case.form for case in cases].count(INTEGER_7) == saturate


def test_kernels_of_7_bits_have_such_weights() -> None:
    import onnx
    from onnx import numpy_helper

    model = onnx.load_from_string(conv(INTEGER_7, 16, 16, 3, 8).write_onnx()[0])
    weights = [t for t in model.graph.initializer if len(t.dims) == 4]
    assert weights
    for tensor in weights:
        assert np.abs(numpy_helper.to_array(tensor).astype(int)).max() <= 64


def test_kernels_are_timed_once_for_each_processor(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("QTRACE_CACHE", str(tmp_path))
    asked = []

    def measure(cases):
        asked.append(sum(len(case.parts) for case in cases))
        return [_times(CONV, INTEGER, 3.0)]

    here = replace(TABLE.machine, processor="another")
    monkeypatch.setattr(fitting, "describe_machine", lambda *names: here)
    for _ in range(2):
        table = fitting.fitted_table(measure)
        assert table.machine is here
        assert table.seconds(CONV, INTEGER) == pytest.approx(3.0 * TABLE.seconds(CONV, INTEGER), rel=1e-6)
    assert len(asked) == 1
    assert 10 <= asked[0] <= 32
    monkeypatch.setattr(fitting, "describe_machine", lambda *names: TABLE.machine)
    assert fitting.fitted_table(measure) is TABLE
    assert len(asked) == 1


def _named(name: str, processor: str) -> CostTable:
    """Returns a table where convolutions on integers take longer on large maps."""
    points = [
        Measurement(_conv(c, n), INTEGER, 1e-6 * n**exponent)
        for c, n in ((16, 7), (64, 14), (128, 28), (32, 56))
        for exponent in (1.0 if name == "onnxruntime" else 2.0,)
    ]
    return CostTable(replace(TABLE.machine, processor=processor), points)


def test_the_packaged_table_that_is_most_like_the_processor_is_scaled(tmp_path, monkeypatch) -> None:
    """The second one takes a third of the time for each shape; beside the first one that varies."""
    monkeypatch.setenv("QTRACE_CACHE", str(tmp_path))
    tables = {name: _named(name, name) for name in ("onnxruntime", "onnxruntime.second")}
    monkeypatch.setattr(CostTable, "packaged", lambda runtime: tables)
    here = replace(TABLE.machine, processor="another")
    monkeypatch.setattr(fitting, "describe_machine", lambda *names: here)
    second = tables["onnxruntime.second"]
    measured = [replace(m, seconds=3 * m.seconds) for m in second.measurements]
    for own in (measured, None):  # then what is remembered
        fitted = fitting.fit_processor(lambda cases, own=own: own)
        assert fitted.base == "onnxruntime.second"
        assert ProcessorFit.from_dict(json.loads(json.dumps(fitted.to_dict()))) == fitted
        for m in second.measurements:
            assert fitted.table().seconds(m.op, m.form) == pytest.approx(3 * m.seconds)
    with pytest.raises(ValueError, match="no packaged cost table 'onnxruntime.third'"):
        ProcessorFit.from_dict({**fitted.to_dict(), "table": "onnxruntime.third"})


@pytest.mark.parametrize("name", CostTable.packaged("onnxruntime"))
def test_a_packaged_table_of_this_processor_is_taken_as_it_is(name: str, monkeypatch) -> None:
    table = CostTable.packaged("onnxruntime")[name]
    here = replace(table.machine, date="2100-01-01")
    monkeypatch.setattr(fitting, "describe_machine", lambda *names: here)
    fitted = fitting.fit_processor(lambda cases: pytest.fail("kernels are timed"))
    assert fitted.base == name
    assert fitted.table() is table


def test_a_fit_beside_other_programs_is_kept_for_an_hour(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("QTRACE_CACHE", str(tmp_path))
    here, asked, share, hour = replace(TABLE.machine, processor="another"), [], [0.5], [7]
    monkeypatch.setattr(fitting, "describe_machine", lambda *names: here)
    monkeypatch.setattr(fitting, "_hour", lambda: hour[0])
    monkeypatch.setattr(fitting, "watched_load", lambda: contextlib.nullcontext(OtherWork(share[0])))

    def measure(cases):
        asked.append(hour[0])
        return [_times(CONV, INTEGER, 3.0)]

    for hour[0] in (7, 7, 8):
        assert fitting.fit_processor(measure).factors
    assert asked == [7, 8]
    hour[0], share[0] = 9, 0.1  # the machine is idle again
    for hour[0] in (9, 10, 11):
        assert fitting.fit_processor(measure).factors
    assert asked == [7, 8, 9]


def test_a_table_that_lacks_times_is_never_the_nearest() -> None:
    full = _named("onnxruntime", "a")
    tables = {"empty": CostTable(full.machine, []), "full": full}
    measured = [replace(m, seconds=m.seconds * (1 + i)) for i, m in enumerate(full.measurements)]
    assert fitting.nearest(tables, measured)[0] == "full"

"""A placement is decided by measured time and noise; the predicted choice stays unless one is better."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import qtrace
from qtrace.benchmarking.fitting import ProcessorFit, Trend
from qtrace.benchmarking.turns import Speed
from qtrace.config.recipe import as_qconfig
from qtrace.costs import FITTED, CostTable
from qtrace.errors import ConfigError
from qtrace.preparation.model import QuantizedModel
from qtrace.preparation.placement.frontier import Point
from qtrace.preparation.placement.problem import Energy, Problem, Unit, evaluate
from qtrace.preparation.placement.trials import LabellingTrial
from qtrace.preparation.prepare import SearchOutcome
from qtrace.process.together import Together
from qtrace.quantizing import bench, delivering, figures, file_runs, measuring
from qtrace.quantizing.bench import Extent, limit_measurement, limit_seconds
from qtrace.quantizing.labellings import (
    choose_labelling,
    find_competitor,
    find_labellings,
    is_doubtful,
    is_settled,
    predict,
    with_everything,
)
from qtrace.quantizing.measuring import fit_costs, prepare_measured
from qtrace.quantizing.openvino_runs import OpenvinoRuns
from qtrace.quantizing.output_noise import group_weights, measure_noise, measure_row_noise, output_groups
from qtrace.quantizing.placing import TimingPlan
from qtrace.quantizing.reporting import LogReporter
from qtrace.quantizing.structure import hash_structure
from qtrace.quantizing.times import MeasuredLabelling, Times
from qtrace.storage.cache import read_cached, write_cached
from tests.nets import images, net

DATA = images(8, 3, 48, 48)


def _measured(name: str, ratio: float, *noise: float, spread: float = 0.01) -> MeasuredLabelling:
    speed = Speed(1e-3 / ratio, ratio, ratio - spread, ratio + spread, 30)
    return MeasuredLabelling(name, (), 1e-3, 20.0, speed, noise or (1e-3, 1e-3))


@pytest.mark.parametrize(
    ("others", "chosen"),
    [
        ([], 0),
        ([_measured("fastest", 1.3)], 1),
        ([_measured("fastest", 1.3, spread=0.35)], 0),  # it may be slower
        ([_measured("fastest", 1.3, 0.05, 0.05)], 0),  # 11 dB for 30 %
        ([_measured("fastest", 1.9, 0.2, 0.2)], 0),  # less than 10 dB spoil an output
        ([_measured("fastest", 1.1, 1e-3, 4e-2)], 0),  # on half of the samples it is worse
        ([_measured("between", 1.2), _measured("fastest", 1.4)], 2),
        ([_measured("float", 1.5, 0.0, 0.0)], 1),
        ([_measured("float", 0.6, 0.0, 0.0)], 0),
        ([_measured("float", 0.95, 0.0, 0.0, spread=0.02)], 0),  # exact, but integers are faster
        ([_measured("float", 1.0, 0.0, 0.0, spread=0.02)], 0),  # not for certain as fast
        ([_measured("between", 1.001, 9e-4, 9e-4)], 0),  # too little to matter
        ([_measured("fastest", 5.0, math.inf, math.inf)], 0),  # outputs that cannot be compared
    ],
)
def test_another_labelling_is_taken_only_if_it_is_better_for_certain(others, chosen) -> None:
    assert choose_labelling([_measured("predicted", 1.0), *others]) == chosen


@pytest.mark.parametrize(
    ("name", "noise", "low", "high", "settled"),
    [
        ("float", 0.0, 0.60, 0.65, True),
        ("float", 0.0, 0.60, 0.67, False),  # too wide a range to show
        ("float", 0.0, 0.97, 1.02, False),  # which of both is faster is not known
        ("float", 0.0, 1.10, 1.15, True),
        ("fastest", 1e-3, 1.02, 1.06, True),  # better at both ends
        ("fastest", 1e-3, 0.99, 1.04, False),
        ("fastest", 1e-3, 0.90, 0.98, True),  # worse at both
        ("fastest", 5e-1, 0.97, 1.04, True),  # spoils outputs, however fast it is
    ],
)
def test_turns_go_on_while_they_may_decide_otherwise(name, noise, low, high, settled) -> None:
    first, other = _measured("predicted", 1.0, 1e-3, 1e-3), _measured(name, 1.0, noise, noise)
    speed = Speed(1e-3, math.sqrt(low * high), low, high, 14)
    assert is_settled([first], other, speed) is settled


def test_turns_end_by_all_that_was_measured_before() -> None:
    """Which of another labelling and float is better is open only where float may be taken."""
    first, whole = _measured("predicted", 1.0, 1e-3, 1e-3), _measured("float", 1.05, 1e-3, 1e-3)
    fastest, speed = _measured("fastest", 1.0, 1e-3, 1e-3), Speed(1e-3, 1.06, 1.03, 1.09, 14)
    assert not is_settled([first, whole], fastest, speed)
    assert is_settled([first, whole], fastest, speed, in_float=False)
    assert is_settled([first, replace(whole, speed=replace(whole.speed, low=1.2))], fastest, speed)


def test_float_that_is_probably_faster_beside_other_programs_is_taken() -> None:
    """They widen the range of 1.12 to 1.2 by a tenth at each end."""
    busy = Speed(1e-3, 1.16, 1.12 / 1.1, 1.2 * 1.1, 30, busy=True)
    for speed, chosen in ((busy, 1), (replace(busy, low=0.99 / 1.1), 0)):
        in_float = replace(_measured("float", 1.0, 0.0, 0.0), speed=speed)
        assert choose_labelling([_measured("predicted", 1.0), in_float]) == chosen


def test_a_choice_that_cannot_be_compared_stays_if_no_other_one_can() -> None:
    lost = _measured("predicted", 1.0, math.inf, math.inf)
    assert choose_labelling([lost, _measured("fastest", 1.5, math.inf, math.inf)]) == 0
    others = [_measured("fastest", 1.5, math.inf, 1e-3), _measured("a", 1.1), _measured("b", 1.2)]
    assert choose_labelling([lost, *others]) == 3


@pytest.mark.parametrize(
    ("run", "budget", "extent"),
    [
        (0.01, 30.0, Extent(16, 29.68)),
        (0.1, 5.0, Extent(16, 1.8)),
        (0.2, 5.0, Extent(4, 3.4)),  # fewer samples
        (0.25, 5.0, Extent(4, 3.0)),  # not the time of nine runs of each: fewer turns
        (0.3, 5.0, None),
    ],
)
def test_what_takes_too_long_is_left_out_by_its_worth(
    run: float, budget: float, extent: Extent | None
) -> None:
    found = limit_measurement(32, run, budget)
    assert (found is None) == (extent is None)
    if found is not None and extent is not None:
        assert found.samples == extent.samples
        assert found.seconds == pytest.approx(extent.seconds)


def test_a_measurement_takes_a_third_of_the_calibration() -> None:
    assert limit_seconds(30.0, 0, 0.1) == pytest.approx(10.0)
    assert limit_seconds(30.0, 60, 0.1) == pytest.approx(14.0)
    assert limit_seconds(0.1, 8, 0.001) == 5.0  # small networks decide, too
    assert limit_seconds(900.0, 8, 0.1) == 30.0


def test_a_graph_to_go_on_with_is_not_left_in_float() -> None:
    measured = [_measured("predicted", 1.0), _measured("float", 1.5, 0.0, 0.0), _measured("fastest", 1.1)]
    assert choose_labelling(measured) == 1
    assert choose_labelling(measured, in_float=False) == 2


def _outcome() -> SearchOutcome:
    units = tuple(Unit(f"u{i}", 4.0, 1.0, noise=10.0 ** (i - 4)) for i in range(5))
    problem = Problem(units, ())
    points = []
    for count in range(5, 0, -1):
        labels = {unit.name: number < count for number, unit in enumerate(units)}
        points.append(Point(labels, evaluate(problem, labels)))
    return SearchOutcome(problem, points[3], "balanced", LabellingTrial(), None, tuple(points))


def test_the_labellings_in_question_lie_between_the_fastest_and_float() -> None:
    labellings = find_labellings(_outcome())
    counts = {name: sum(o.point.labels.values()) for name, o in labellings.items()}
    assert list(counts)[:2] == ["predicted", "fastest"]
    assert (counts["predicted"], counts["fastest"], counts["float"]) == (2, 5, 0)
    assert all(2 < n < 5 for name, n in counts.items() if name.endswith("between"))
    assert labellings["float"].point.energy == Energy(20.0, 0.0, 0.0)


def _pair(outcome: SearchOutcome, ratio: float, noise: float) -> list[MeasuredLabelling]:
    """Returns the predicted choice and float, ``ratio`` times as fast, as if they were measured."""
    measured = []
    for name, speed, power in (("predicted", 1.0, noise), ("float", ratio, 0.0)):
        point = find_labellings(outcome)[name].point
        integers = tuple(unit for unit, label in point.labels.items() if label)
        seconds, decibels = predict(point)
        timed = Speed(seconds / speed, speed, speed, speed, 30)
        measured.append(MeasuredLabelling(name, integers, seconds, decibels, timed, (power, power)))
    return measured


def _waiting(outcome: SearchOutcome) -> dict[str, SearchOutcome]:
    return {n: o for n, o in find_labellings(outcome).items() if n not in ("predicted", "float")}


def _without(waiting: dict[str, SearchOutcome], name: str) -> dict[str, SearchOutcome]:
    return {n: o for n, o in waiting.items() if n != name}


def test_what_is_measured_next_is_what_may_win_by_the_errors_of_prediction() -> None:
    """Two of five ops are predicted to be 1.43 times as fast as float, with a noise of 29.6 dB."""
    outcome = _outcome()
    seconds, decibels = predict(outcome.point)
    exact = seconds / predict(find_labellings(outcome)["float"].point)[0]
    noise = 10 ** (-decibels / 10)
    waiting = _waiting(outcome)
    assert len(waiting) == 3
    slow = Problem(tuple(replace(unit, integer_seconds=3.9) for unit in outcome.problem.units), ())
    points = [Point(p.labels, evaluate(slow, p.labels)) for p in outcome.frontier]
    same = replace(outcome, problem=slow, frontier=tuple(points), point=points[3])
    right = _pair(same, predict(points[3])[0] / 20.0, 10 ** (-predict(points[3])[1] / 10))
    assert find_competitor(right, _waiting(same)) is None  # as predicted: nothing gains enough
    assert find_competitor(_pair(outcome, exact / 2, noise), waiting) is not None
    # 1.27 and 1.75 times as fast, with 19.5 and 9.5 dB: the first has the lower price.
    assert find_competitor(_pair(outcome, exact, math.inf), waiting) == "50% between"
    assert find_competitor(_pair(outcome, exact, math.inf), _without(waiting, "50% between")) == "25% between"
    lost = {n: o for n, o in waiting.items() if predict(o.point)[1] < 6.0}
    assert find_competitor(_pair(outcome, exact / 2, noise), lost) is None  # it would spoil an output


def test_float_that_was_measured_best_has_to_be_beaten() -> None:
    outcome = _outcome()
    measured = _pair(outcome, 1.2, 1e-3)
    near = {n: o for n, o in _waiting(outcome).items() if n.startswith("50%")}
    assert find_competitor(measured, near, in_float=False) is not None
    fast = [measured[0], replace(measured[1], speed=Speed(1e-3, 9.0, 9.0, 9.0, 30))]
    assert choose_labelling(fast) == 1


def _traced(example=DATA[:1]):
    layers = {"a": M.Conv2d(3, 32, 3), "b": M.Conv2d(32, 32, 3), "c": M.Conv2d(32, 8, 3)}
    module = net(lambda self, x: self.c(F.relu(self.b(F.relu(self.a(x))))), **layers)
    return qtrace.trace(module, example, check=False)


def _fixed(path: Path, integers: tuple[str, ...]) -> Times:
    chosen = Speed(5e-4, 2.0, 1.9, 2.1, 30)
    own = MeasuredLabelling("predicted", integers, 1e-3, 30.0, chosen, (1.0, 1.0))
    other = MeasuredLabelling("between", integers, 1e-3, 30.0, chosen, (1e-4, 1e-4))
    times = Times(path, (own, other), integers=integers)
    times.bind(_traced(), as_qconfig({"placement": "balanced"}))
    return times


def test_given_times_decide_and_nothing_is_measured(tmp_path: Path, caplog) -> None:
    traced, config = _traced(), as_qconfig({"placement": "balanced"})
    batches = [DATA[:4]]
    path = tmp_path / "times.json"
    _fixed(path, ("b_out",)).write()
    times = Times.open(path)
    assert times.fixed
    with caplog.at_level(logging.INFO, "qtrace"):
        prepared = prepare_measured(traced, config, batches, list, TimingPlan(times), LogReporter())
    notes = {note.name: note.state for note in QuantizedModel(prepared).annotation.notes}
    assert [notes[name] for name in ("a_out", "b_out", "c_out")] == ["float", "int", "float"]
    assert any("between is chosen" in line for line in caplog.messages)
    assert "between is chosen" in str(qtrace.explain(prepared))


@pytest.mark.parametrize("placement", ["balanced", "fastest", "small"])
def test_who_goes_on_places_by_the_costs_of_the_first_run(tmp_path: Path, monkeypatch, placement) -> None:
    """Decisions and what is said of them are the same, so that checkpoints still belong to them."""
    machine = replace(CostTable.load("onnxruntime").machine, processor="another")
    factors = {("conv", form): Trend.of([factor], []) for form, factor in (("integer", 2.5), ("float", 0.7))}
    fit = ProcessorFit(machine, factors)
    monkeypatch.setattr(measuring, "fit_costs", lambda config: fit)
    config, path = as_qconfig({"placement": placement}), tmp_path / "times.json"
    records = []
    for _ in range(2):
        times = Times.open(path)
        prepared = prepare_measured(_traced(), config, [DATA[:4]], list, TimingPlan(times), LogReporter())
        records.append(QuantizedModel(prepared).annotation.to_json())
        times.write()
        monkeypatch.setattr(measuring, "fit_costs", _refuse)
    assert times.fixed
    assert times.fit == fit
    assert records[0] == records[1]
    assert FITTED in records[0]


def test_times_of_another_network_and_damaged_ones_are_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    _fixed(path, ("b_out",)).write()
    times, config = Times.open(path), as_qconfig({"placement": "balanced"})
    times.bind(_traced(), config)
    for other, same in (
        (_traced(), {"backend": "openvino"}),
        (_traced(images(1, 3, 40, 40)), {}),
        (_traced(), {"placement": "small"}),
    ):
        with pytest.raises(
            ConfigError, match="of another network, other shapes, another target or placement"
        ):
            times.bind(other, as_qconfig({"placement": "balanced", **same}))
    for text in ("{", "[]", '{"schema": "qtrace-times/1"}', json.dumps({"schema": "other"})):
        path.write_text(text)
        with pytest.raises(ConfigError, match="holds no times that qtrace has measured"):
            Times.open(path)
    assert not Times.open(tmp_path / "new.json").fixed


_OPENERS = {"onnxruntime": "open_session", "openvino": "OpenvinoRuns"}


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino", "tflite", "ncnn"])
def test_what_is_measured_decides_and_is_written(tmp_path: Path, monkeypatch, backend: str) -> None:
    """By a timer that gives times: the labellings are exported and run in their runtime, for their noise."""
    monkeypatch.setattr(measuring, "find_labellings", find_labellings)  # those of the search
    own = _OPENERS.get(backend, "LabellingRuns")
    for other in {*_OPENERS.values(), "LabellingRuns"} - {own}:
        monkeypatch.setattr(file_runs, other, _refuse)  # it runs files in another runtime
    traced, config = _traced(), as_qconfig({"backend": backend, "placement": "balanced"})
    asked: list[int] = []

    def timer(paths, **options):
        asked.append(len(paths))
        assert options["runtime"] == {"tflite": "litert"}.get(backend, backend)
        return [Speed(1e-3, 1.0, 1.0, 1.0, 9), *[Speed(1e-3, 0.5, 0.5, 0.5, 9)] * (len(paths) - 1)]

    times = Times(tmp_path / "times.json")
    measurement = TimingPlan(times, timer)
    prepared = prepare_measured(traced, config, [DATA[:4]], lambda: [DATA[4:]], measurement, LogReporter())
    assert asked == [2] * (len(times.labellings) - 1)
    by_name = {labelling.name: labelling for labelling in times.labellings}
    assert by_name["float"].noise == (0.0, 0.0)
    assert 1e-6 < by_name["predicted"].noise[0] < 1e-2
    assert "the predicted choice stays" in " ".join(str(qtrace.explain(prepared)).split())
    times.write()
    assert Times.open(times.path).labellings == times.labellings


@pytest.mark.parametrize(("ratio", "chosen"), [(2.0, True), (1.0, False)])
def test_in_openvino_a_labelling_without_zero_points_is_in_question(
    tmp_path: Path, monkeypatch, ratio: float, chosen: bool
) -> None:
    """Noise is the price of it; given times decide alike, and the file is verified."""
    monkeypatch.setattr(measuring, "find_labellings", find_labellings)
    monkeypatch.setenv("QTRACE_CACHE", str(tmp_path / "cache"))

    def timer(paths, **options):
        speed = 0.5 if paths[1].stem == "1" else ratio
        return [Speed(1e-3, 1.0, 1.0, 1.0, 9), Speed(1e-3 / speed, speed, speed, speed, 9)]

    monkeypatch.setattr(bench, "compare_files", timer)
    path, data = tmp_path / "times.json", [DATA[:4] + 0.5, DATA[4:] + 0.5]
    for number in range(2):
        monkeypatch.setattr(bench, "compare_files", timer if number == 0 else _refuse)
        options = {"target": "openvino", "times": path, "progress": False, "force": True}
        result = qtrace.quantize(_traced(), data, tmp_path / "net.onnx", **options)
        assert ("without zero points is chosen" in " ".join(str(result.explain()).split())) is chosen
        types = {tensor.data_type for tensor in onnx.load(result.path).graph.initializer if not tensor.dims}
        assert (TensorProto.INT8 in types) is chosen
        assert result.verify is not None
        assert result.verify.passed
    last = Times.open(path).labellings[-1]
    assert last.centred
    assert last.noise > Times.open(path).labellings[0].noise


@pytest.mark.parametrize(("is_noisy", "count"), [(True, 2), (False, 1)])
def test_where_the_best_is_noisy_quieter_ones_are_tried_without_zero_points_too(
    tmp_path: Path, monkeypatch, is_noisy: bool, count: int
) -> None:
    """Files 0 and 1 are one op on integers and float; 2 is wider, twice as fast; the others are without."""
    monkeypatch.setattr(measuring, "find_labellings", _between_all_and_float)
    monkeypatch.setattr(bench, "is_noisy", lambda labelling: is_noisy)
    ratios = {"1": 0.5, "2": 2.0, "3": 4.0, "4": 1.5}

    def timer(paths, **options):
        ratio = ratios[paths[1].stem]
        return [Speed(1e-3, 1.0, 1.0, 1.0, 9), Speed(1e-3 / ratio, ratio, ratio, ratio, 9)]

    config = as_qconfig({"backend": "openvino", "placement": "balanced"})
    times, data = Times(tmp_path / "times.json"), [DATA[:4] + 0.5]
    plan = TimingPlan(times, timer)
    prepare_measured(_traced(), config, data, lambda: [DATA[4:] + 0.5], plan, LogReporter())
    assert [m.name for m in times.labellings if m.centred] == [
        "wider without zero points",
        "predicted without zero points",
    ][:count]


@pytest.mark.parametrize(
    ("backend", "beside"), [("onnxruntime", True), ("openvino", False), ("tflite", False)]
)
def test_files_run_beside_each_other_in_onnxruntime_with_the_same_noise(
    monkeypatch, backend: str, beside: bool
) -> None:
    monkeypatch.setattr(measuring, "find_labellings", find_labellings)  # those of the search
    used, noises = set(), []

    def measure(count: int) -> None:
        def together(threads: int | None) -> Together:
            used.add(threads)
            return Together(threads or count)

        monkeypatch.setattr(bench, "Together", together)
        config, times = as_qconfig({"backend": backend, "placement": "balanced"}), Times()
        plan = TimingPlan(times, lambda paths, **options: [Speed(1e-3, 1.0, 1.0, 1.0, 9) for _ in paths])
        prepare_measured(_traced(), config, [DATA[:4]], lambda: [DATA[4:]], plan, LogReporter())
        noises.append([labelling.noise for labelling in times.labellings])

    for count in (1, 3):
        measure(count)
    assert used == {None if beside else 1}
    assert noises[0] == noises[1]
    assert max(map(max, noises[0])) > 0


def test_a_noisy_choice_is_in_doubt() -> None:
    """As predicted, and faster than float: 15 dB alone are the reason to look further."""
    whole, power = _measured("float", 0.5, 0.0, 0.0), 10**-1.5
    noisy = replace(_measured("predicted", 1.0, power, power), predicted_db=15.0)
    quiet = replace(_measured("between", 0.99, 1e-3, 1e-3), predicted_db=30.0)
    assert is_doubtful([noisy, whole])
    assert not is_doubtful([noisy, whole, quiet])
    assert not is_doubtful([replace(quiet, name="predicted"), whole])


@pytest.mark.parametrize(
    ("in_float", "seconds", "said"),
    [
        (1.0, 1e9, "wider is chosen"),
        (1.0, 1.0, "the predicted choice stays; not measured, for want of time: wider (predicted"),
        (1.5, 1.0, "wider is chosen"),  # it would be float, for want of time
    ],
)
def test_a_labelling_that_may_be_better_is_measured_or_named(
    tmp_path: Path, monkeypatch, in_float: float, seconds: float, said: str
) -> None:
    """The predicted choice is no faster than float, and another labelling is twice as fast."""
    monkeypatch.setattr(measuring, "find_labellings", _between_all_and_float)
    monkeypatch.setattr(bench, "limit_seconds", lambda *args: seconds)
    monkeypatch.setattr(bench.time, "process_time", iter(range(0, 10**6, 10)).__next__)
    traced, config = _traced(), as_qconfig({"placement": "balanced"})
    ratios = iter((in_float, 2.0))

    def timer(paths, **options):
        ratio = next(ratios)
        return [Speed(1e-3, 1.0, 1.0, 1.0, 9), Speed(1e-3, ratio, ratio, ratio, 9)]

    path, texts = tmp_path / "times.json", []
    for measure in (timer, _refuse):
        times = Times.open(path)
        plan = TimingPlan(times, measure)
        prepared = prepare_measured(traced, config, [DATA[:4]], lambda: [DATA[4:]], plan, LogReporter())
        texts.append(str(qtrace.explain(prepared)))
        times.write()
    assert said in texts[0]
    assert said in texts[1]


def _quantize_by_default(tmp_path: Path, monkeypatch, suffix: str, speeds: list[float], **options):
    """Quantizes by the default of a target, with the speeds of all on integers, of float, and of others."""
    monkeypatch.setattr(measuring, "find_labellings", lambda outcome: _some(outcome, "b_out"))
    asked: list[list[str]] = []

    def timer(paths, **options):
        asked.append([path.stem for path in paths])
        own = [speeds[min(int(path.stem), 2)] for path in paths]
        return [Speed(1e-3 / speed, *[speed / own[0]] * 3, 9) for speed in own]

    def delivered(paths, **options):
        return [Speed(1e-3, 1.0, 1.0, 1.0, 9), Speed(1e-3, 2.0, 2.0, 2.0, 9)]

    monkeypatch.setattr(bench, "compare_files", timer)
    monkeypatch.setattr(delivering, "compare_files", delivered)
    path, times = tmp_path / f"out{suffix}", tmp_path / "times.json"
    data = [DATA[:4], DATA[4:]]
    options = {"times": times, "batch_size": 1, "force": True, **options}
    result = qtrace.quantize(_traced(), data, path, progress=False, **options)
    states = {note.name: note.state for note in QuantizedModel(result.prepared).annotation.notes}
    return result, [states[name] for name in ("a_out", "b_out", "c_out")], asked


@pytest.mark.parametrize(
    ("suffix", "speeds", "states", "said"),
    [
        (".tflite", [2.0, 1.0, 1.5], ["int", "int", "int"], "measured  2.00x"),
        (".param", [2.0, 1.0, 1.5], ["int", "int", "int"], "measured  2.00x"),
        (".tflite", [0.8, 1.0, 0.9], ["float", "float", "float"], "ms at least, 0.90x as fast as float"),
        (".param", [0.8, 1.0, 0.9], ["float", "float", "float"], "ms at least, 0.80x as fast as float"),
        (".tflite", [0.8, 1.0, 1.6], ["float", "int", "float"], "measured  2.00x"),
    ],
)
def test_the_default_that_rounds_everything_for_speed_is_measured(
    tmp_path: Path, monkeypatch, suffix: str, speeds: list[float], states: list[str], said: str
) -> None:
    """It stays, float is delivered, or what lies between; given times decide alike."""
    monkeypatch.setenv("QTRACE_CACHE", str(tmp_path / "cache"))
    for number in range(2):
        result, found, asked = _quantize_by_default(tmp_path, monkeypatch, suffix, speeds)
        assert found == states
        assert any(said in line for line in result.summary())
        assert bool(asked) is (number == 0)
        assert result.verify is not None
        assert result.verify.passed


@pytest.mark.parametrize(
    ("options", "states"),
    [
        ({"target": "ncnn"}, ["int", "int", "int"]),
        ({"recipe": {"backend": "tflite", "placement": "balanced"}}, ["int", "int", "int"]),
    ],
)
def test_who_keeps_the_quantized_file_gets_integers(tmp_path: Path, monkeypatch, options, states) -> None:
    monkeypatch.setenv("QTRACE_CACHE", str(tmp_path / "cache"))
    speeds = [0.8, 1.0, 0.9]
    suffix = ".param" if "target" in options else ".tflite"
    result, found, _ = _quantize_by_default(tmp_path, monkeypatch, suffix, speeds, keep=True, **options)
    assert found == states
    assert result.to_dict()["delivered"] == "quantized"


@pytest.mark.parametrize("target", ["tflite", "ncnn"])
def test_without_its_runtime_the_default_rounds_everything(monkeypatch, target: str) -> None:
    installed, absent = importlib.util.find_spec, {"tflite": "ai_edge_litert", "ncnn": "ncnn"}[target]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == absent else installed(name))
    monkeypatch.setattr(measuring, "find_labellings", _refuse)
    config, notes = as_qconfig(f"backend/{target}"), _Notes()
    plan = TimingPlan(Times())
    prepared = prepare_measured(_traced(), config, [DATA[:4]], lambda: [DATA[4:]], plan, notes)
    states = {note.name: note.state for note in QuantizedModel(prepared).annotation.notes}
    assert [states[name] for name in ("a_out", "b_out", "c_out")] == ["int"] * 3
    assert plan.times.labellings == ()


def test_everything_is_one_of_the_labellings_once() -> None:
    outcome = _outcome()
    found = find_labellings(outcome)
    names = list(with_everything(found, outcome, first=True))
    assert (names[0], names[-1]) == ("everything", "float")
    assert "fastest" not in names  # it has the same labels
    assert list(with_everything(found, outcome, first=False)) == list(found)
    some = {name: found[name] for name in ("predicted", "float")}
    assert list(with_everything(some, outcome, first=False)) == ["predicted", "everything", "float"]
    in_float = {"predicted": outcome.instead(outcome.float_labels)}
    assert list(with_everything(in_float, outcome, first=True)) == ["everything", "float"]


def _between_all_and_float(outcome: SearchOutcome) -> dict[str, SearchOutcome]:
    return _some(outcome, next(iter(outcome.float_labels)))


def _some(outcome: SearchOutcome, op: str) -> dict[str, SearchOutcome]:
    """Returns a labelling with one op on integers, one with all, and float."""
    names = list(outcome.float_labels)
    one = {name: name == op for name in names}
    labellings = {"predicted": one, "wider": dict.fromkeys(names, True), "float": outcome.float_labels}
    return {name: outcome.instead(labels) for name, labels in labellings.items()}


def test_the_cache_leaves_out_what_is_damaged(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setenv("QTRACE_CACHE", str(tmp_path / "cache"))
    assert read_cached("times", ["a", 1]) is None
    write_cached("times", ["a", 1], {"seconds": 2.0})
    assert read_cached("times", ["a", 1]) == {"seconds": 2.0}
    assert read_cached("times", ["a", 2]) is None
    (file,) = (tmp_path / "cache").iterdir()
    for text in ("", "{}", '{"key": ["b"], "value": 1}'):
        file.write_text(text)
        assert read_cached("times", ["a", 1]) is None
    assert sum("is damaged and is left out" in line for line in caplog.messages) == 3
    monkeypatch.setenv("QTRACE_CACHE", "/proc/nothing")
    write_cached("times", ["a", 1], {})
    assert read_cached("times", ["a", 1]) is None


def test_files_of_like_structure_have_one_key(tmp_path: Path) -> None:
    paths = [qtrace.export(_traced(), tmp_path / f"{i}.onnx") for i in range(2)]
    other = net(lambda self, x: self.a(x), a=M.Conv2d(3, 32, 3))
    paths.append(qtrace.export(qtrace.trace(other, DATA[:1], check=False), tmp_path / "other.onnx"))
    keys = [hash_structure(path) for path in paths]
    assert keys[0] == keys[1] != keys[2]


def test_where_float_is_measured_best_the_file_is_in_float(tmp_path: Path, caplog) -> None:
    """Such a graph has no site, which is an error only where nobody decided so."""
    path = tmp_path / "times.json"
    _fixed(path, ()).write()
    with caplog.at_level(logging.WARNING, "qtrace"):
        result = qtrace.quantize(
            _traced(),
            [DATA[:4], DATA[4:]],
            tmp_path / "net.onnx",
            recipe={"placement": "balanced"},
            times=path,
            progress=False,
        )
    kinds = {node.op_type for node in onnx.load(result.path).graph.node}
    assert "Conv" in kinds
    assert "QuantizeLinear" not in kinds
    assert result.verify is not None
    assert result.verify.passed
    assert any("between is chosen" in line for line in caplog.messages)
    assert "  no op of the file is on integers: `explain()` says why for each" in result.summary()
    # The order of sums in the file is no noise of quantization.
    assert result.verdict.line().startswith("verdict   good: outputs are exact")


def _noises(traced, exact, own):
    weights = group_weights(output_groups(traced, exact), exact, [len(batch[0]) for batch in exact])
    return measure_noise(weights, exact, own)


def test_noise_counts_beside_what_differs_between_samples() -> None:
    """Boxes of 4 pixels beside the corners of their grid: an error of 1 pixel is a loss of 12 dB of them."""
    random = np.random.default_rng(0)
    exact = np.linspace(100, 600, 200) + 4.0 * random.normal(size=(64, 200))
    noisy = exact + random.normal(size=exact.shape)
    assert np.square(noisy - exact).sum() / np.square(exact).sum() < 1e-5
    expected = 1 / 16 / 10**0.7  # 7 dB less than beside the differences
    assert _noises(None, [[exact]], [[noisy]]) == pytest.approx((expected, expected), rel=0.05)
    # Beside a number, and in batches of one, it is the same: inputs tell how many samples there are.
    number = np.float64(3.0)
    for cut in (np.split(exact, 64), [exact]):
        batches = [[part, np.asarray(number)] for part in cut]
        own = [[part, np.asarray(number)] for part in (np.split(noisy, 64) if len(cut) > 1 else [noisy])]
        weights = group_weights(output_groups(None, batches), batches, [len(part) for part in cut])
        assert measure_noise(weights, batches, own) == pytest.approx((expected, expected), rel=0.05)


def test_the_worst_group_of_columns_is_the_noise() -> None:
    """Dead scores beside boxes: of all values their error is 26 dB below the power."""
    random = np.random.default_rng(0)
    exact = np.concatenate([random.uniform(0, 100, (8, 50, 4)), random.uniform(0, 1, (8, 50, 4))], 2)
    dead = exact.astype(np.float32)
    dead[:, :, 4:] = 0
    assert np.square(dead - exact).sum() / np.square(exact).sum() < 1e-3
    assert _noises(None, [[exact]], [[dead]]) == pytest.approx((1.0, 1.0))
    dead[:4, :, 4:] = exact[:4, :, 4:]
    first, second = _noises(None, [[exact]], [[dead]])
    assert first < 1e-6
    assert second == pytest.approx(1.0)


def _selects_by(shift: list[float]):
    """A graph that picks the rows of the best three scores, which are ``shift`` off."""

    def forward(self, scores, rows):
        _, index = F.topk(scores + self.shift, 3, descending=True)
        return F.gather(rows, 1, F.broadcast_to(F.expand_dims(index, 2), (*index.shape, rows.shape[2])))

    module = net(forward)
    module.shift = mge.Parameter(np.array([shift], np.float32))
    return qtrace.trace(module, np.zeros((2, 6), np.float32), np.zeros((2, 6, 4), np.float32), check=False)


@pytest.mark.parametrize(
    ("shift", "noise"),
    [
        ([0.0, -0.3, 0.3, 0.0, 0.0, 0.0], 0.0),  # two rows change their places
        ([0.0, 0.0, 0.0, 0.0, 0.0, 9.0], 1 / 3),  # one of three is another one
    ],
)
def test_selected_rows_are_compared_with_the_same_rows(shift: list[float], noise: float, synchronous) -> None:
    rng = np.random.default_rng(0)
    scores = np.tile(np.float32([[0.0, 5.2, 5.0, 4.0, 1.0, 0.5]]), (2, 1))
    batches = [(scores, rng.normal(size=(2, 6, 4)).astype(np.float32)) for _ in range(3)]
    exact, graph = _selects_by([0.0] * 6), _selects_by(shift)
    assert measure_row_noise(exact, graph, batches, [2] * 3) == pytest.approx((noise, noise))
    values = [[[t(*map(mge.Tensor, batch)).numpy()] for batch in batches] for t in (exact, graph)]
    assert min(_noises(None, *values)) > 0.1  # by their places


@pytest.mark.parametrize(
    ("own", "noise"),
    [
        ([np.ones((4, 5)), np.zeros((4, 2), np.int32)], 0.0),
        ([np.ones((4, 5)), np.eye(4, 2, dtype=np.int32)], 0.5),  # of the first half
        ([np.full((4, 5), np.nan), np.zeros((4, 2), np.int32)], math.inf),
        ([np.full((4, 5), np.inf), np.zeros((4, 2), np.int32)], math.inf),
        ([np.ones((3, 5)), np.zeros((4, 2), np.int32)], math.inf),
        ([np.ones((4, 5)), np.zeros((3, 2), np.int32)], math.inf),
        ([np.ones((4, 5))], math.inf),
    ],
)
def test_integers_and_what_cannot_be_compared_have_noise(own: list[np.ndarray], noise: float) -> None:
    exact = [[np.ones((4, 5)), np.zeros((4, 2), np.int32)]]
    assert _noises(None, exact, [own])[0] == noise


def test_infinities_that_float_has_are_no_noise() -> None:
    exact = [[np.array([[1.0, -np.inf, 3.0]] * 4)]]
    assert _noises(None, exact, exact) == (0.0, 0.0)


def _stored(path: Path, op: str, *stored: np.ndarray, domain: str = "") -> str:
    value = onnx.helper.make_tensor_value_info
    names = [f"s{number}" for number in range(len(stored))]
    node = onnx.helper.make_node(op, ["x", *names], ["y"], domain=domain)
    ends = ([value("x", 1, [1, 4])], [value("y", 1, None)])
    tensors = [onnx.numpy_helper.from_array(v, name) for v, name in zip(stored, names, strict=True)]
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "g", *ends, tensors))
    onnx.save(model, path)
    return hash_structure(path)


def test_arguments_that_are_stored_are_part_of_the_key_and_weights_are_not(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    for op in ("Resize", "Pad", "Reshape", "Slice", "Gather"):
        for kind in (np.int64, np.float32):
            keys = {_stored(path, op, np.array([1, n], kind)) for n in (1, 2, 2)}
            assert len(keys) == 2, op
    assert len({_stored(path, "Gather", np.arange(100) + n) for n in (0, 1)}) == 2
    assert len({_stored(path, "MatMul", np.full((4, 4), n, np.float32)) for n in (0, 1)}) == 1
    assert len({_stored(path, "Gelu", domain=domain) for domain in ("", "com.microsoft")}) == 2
    scales = [np.float32(0.1), np.float32(0.2)]
    assert len({_stored(path, "QuantizeLinear", scale, np.uint8(0)) for scale in scales}) == 1
    assert len({_stored(path, "QuantizeLinear", scales[0], np.uint8(zero)) for zero in (0, 128)}) == 2
    assert len({_stored(path, "QuantizeLinear", scales[0], np.uint8(zero)) for zero in (7, 128)}) == 1


@pytest.mark.parametrize("busy", [False, True])
def test_times_beside_other_programs_are_not_remembered(tmp_path: Path, monkeypatch, busy: bool) -> None:
    monkeypatch.setenv("QTRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(measuring, "find_labellings", find_labellings)
    speeds = [Speed(1e-3, 1.0, 1.0, 1.0, 9), Speed(2e-3, 0.5, 0.4, 0.6, 9, busy)]
    monkeypatch.setattr(bench, "compare_files", lambda *args, **options: speeds)
    plan = TimingPlan(Times())
    config = as_qconfig({"placement": "balanced"})
    prepare_measured(_traced(), config, [DATA[:4]], lambda: [DATA[4:]], plan, LogReporter())
    assert plan.times.labellings
    folder = tmp_path / "cache"
    assert bool(folder.exists() and list(folder.glob("labellings-*"))) is not busy


def test_times_that_decided_something_else_are_not_remembered_for_it(tmp_path: Path, monkeypatch) -> None:
    """A measurement that ended early is good for decisions that it settles; a whole one for all."""
    monkeypatch.setenv("QTRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(measuring, "find_labellings", find_labellings)
    speeds, config = (
        [Speed(1e-3, 1.0, 1.0, 1.0, 9), Speed(2e-3, 0.5, 0.49, 0.51, 9)],
        {"placement": "balanced"},
    )
    timed: list[object] = []

    def timer(paths, **options):
        timed.append(paths)
        return speeds

    monkeypatch.setattr(bench, "compare_files", timer)

    def run(is_enough: bool) -> int:
        timed.clear()
        monkeypatch.setattr(bench, "is_settled", lambda *args: is_enough)
        plan = TimingPlan(Times())
        prepare_measured(_traced(), as_qconfig(config), [DATA[:4]], lambda: [DATA[4:]], plan, LogReporter())
        return len(timed)

    count = run(True)
    assert count
    assert [run(True), run(False), run(True), run(False)] == [0, count, 0, 0]


class _Notes(LogReporter):
    def __init__(self) -> None:
        super().__init__(False)
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


def _refuse(*args: object, **options: object) -> list[Speed]:
    raise AssertionError("nothing is timed")


@pytest.mark.parametrize(
    ("held_back", "seconds", "note"),
    [([], 1e-3, "no samples are held back"), ([DATA[4:]], 9.0, "a run takes 9 s, and .* s are too little")],
)
def test_without_samples_or_time_the_prediction_stays(monkeypatch, held_back, seconds, note) -> None:
    monkeypatch.setattr(measuring, "find_labellings", find_labellings)
    monkeypatch.setattr(bench, "_time_run", lambda *args: seconds)
    times, notes, config = Times(), _Notes(), as_qconfig({"placement": "balanced"})
    prepare_measured(_traced(), config, [DATA[:4]], lambda: held_back, TimingPlan(times, _refuse), notes)
    assert times.labellings == ()
    (text,) = [text for text in notes.texts if "none could be measured" in text]
    assert re.search(note, text)


def test_without_openvino_the_prediction_stays(monkeypatch) -> None:
    monkeypatch.setattr(measuring, "find_labellings", find_labellings)
    installed = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "openvino" else installed(name)
    )
    config = as_qconfig({"backend": "openvino", "placement": "balanced"})
    times, notes = Times(), _Notes()
    prepare_measured(_traced(), config, [DATA[:4]], lambda: [DATA[4:]], TimingPlan(times, _refuse), notes)
    assert times.labellings == ()
    assert any("in openvino, the package openvino is needed" in text for text in notes.texts)


def test_the_inputs_of_a_file_in_openvino_are_those_of_the_file(tmp_path: Path) -> None:
    """OpenVINO has no port for an input that nothing reads, and takes integers as the file declares them."""
    kinds = {"unread": TensorProto.FLOAT, "row": TensorProto.INT64, "x": TensorProto.FLOAT}
    shapes = {"unread": ["n", 2], "row": [1], "x": ["n", 3]}
    declared = [helper.make_tensor_value_info(name, kinds[name], shapes[name]) for name in kinds]
    nodes = [helper.make_node("Gather", ["x", "row"], ["y"], axis=1)]
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    model = helper.make_model(
        helper.make_graph(nodes, "g", declared, [out]),
        opset_imports=[helper.make_opsetid("", 13)],
        ir_version=8,
    )
    onnx.save(model, tmp_path / "m.onnx")
    runs = OpenvinoRuns(tmp_path / "m.onnx")
    assert [(value.name, value.shape) for value in runs.inputs] == [
        ("unread", [None, 2]),
        ("row", [1]),
        ("x", [None, 3]),
    ]
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    for count in (2, 1):
        feeds = {"unread": x[:count, :2], "row": np.array([2], np.int32), "x": x[:count]}
        (y,) = runs.run(None, feeds)
        assert np.array_equal(y, x[:count, 2:])


def test_without_the_runtime_nothing_is_fitted_or_measured(monkeypatch) -> None:
    monkeypatch.setattr(measuring, "find_labellings", _refuse)
    monkeypatch.setattr(measuring, "fit_costs", fit_costs)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    times, notes, config = Times(), _Notes(), as_qconfig({"placement": "balanced"})
    prepare_measured(_traced(), config, [DATA[:4]], list, TimingPlan(times, _refuse), notes)
    assert any("none can be measured here: onnxruntime cannot be imported" in text for text in notes.texts)
    placed = SimpleNamespace(
        cost_table=None, weight_bits=8, placement=SimpleNamespace(table=FITTED), backend="onnxruntime"
    )
    table = figures._read_costs(placed)  # of a graph that was prepared where the runtime is
    assert table is not None
    assert table.machine == CostTable.load("onnxruntime").machine

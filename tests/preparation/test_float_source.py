"""Labellings of one network share its float graph and what was measured in it."""

from __future__ import annotations

from pathlib import Path

import megengine.functional as F
import megengine.module as M
import pytest

import qtrace
from qtrace.calibration.known_ranges import from_ranges, measure_ranges
from qtrace.config.recipe import as_qconfig
from qtrace.graph.types import TracedModule
from qtrace.preparation.model import QuantizedModel
from qtrace.preparation.placement import reference
from qtrace.preparation.prepare import FloatSource, prepare_placed
from tests.nets import images, net

DATA = images(4, 3, 16, 16)
CONFIG = as_qconfig({"placement": "balanced", "ptq": ["fuse_bn"]})


def _traced() -> TracedModule:
    layers = {"a": M.Conv2d(3, 8, 3), "bn": M.BatchNorm2d(8), "b": M.Conv2d(8, 4, 1)}
    return qtrace.trace(net(lambda self, x: self.b(F.relu(self.bn(self.a(x)))), **layers), DATA[:2])


def _file(prepared: TracedModule, path: Path) -> bytes:
    qtrace.calibrate(prepared, [DATA], progress=False)
    qtrace.export(qtrace.convert(prepared), path)
    return path.read_bytes()


def test_a_copy_gives_the_file_of_a_graph_of_its_own_without_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced, runs = _traced(), []
    run = reference.RangeStatistics.execute
    monkeypatch.setattr(
        reference.RangeStatistics, "execute", lambda self, inputs: runs.append(1) or run(self, inputs)
    )
    source = FloatSource(traced, CONFIG, [DATA])
    _, outcome = prepare_placed(traced, CONFIG, [DATA], source=source)
    assert outcome is not None
    assert len(runs) == 1
    everything = outcome.instead(dict.fromkeys(outcome.point.labels, True))
    for number, other in enumerate((everything, outcome)):
        runs.clear()
        shared, _ = prepare_placed(traced, CONFIG, [DATA], outcome=other, source=source)
        assert not runs
        own, _ = prepare_placed(traced, CONFIG, [DATA], outcome=other)
        assert _file(shared, tmp_path / f"{number}.onnx") == _file(own, tmp_path / f"{number}.onnx")


def test_generated_images_are_the_same_in_a_copy() -> None:
    traced = _traced()
    source = FloatSource(traced, CONFIG)
    first, _ = prepare_placed(traced, CONFIG, None, source=source)
    second, _ = prepare_placed(traced, CONFIG, None, source=source)
    own, _ = prepare_placed(traced, CONFIG, None)
    assert str(qtrace.explain(first)) == str(qtrace.explain(second)) == str(qtrace.explain(own))


def test_known_ranges_calibrate_as_the_batches_do(tmp_path: Path) -> None:
    config = as_qconfig({"placement": "balanced", "observers": {"activation": "minmax", "weight": "minmax"}})
    source = FloatSource(_traced(), config, [DATA])
    _, outcome = prepare_placed(_traced(), config, [DATA], source=source)
    assert outcome is not None
    everything = outcome.instead(dict.fromkeys(outcome.point.labels, True))
    prepared, _ = prepare_placed(_traced(), config, [DATA], outcome=everything, source=source)
    assert source.facts is not None
    assert source.facts.measured is not None
    assert source.calls is not None
    known = source.facts.measured.ranges
    own = [site.node.name for site in QuantizedModel(prepared).sites if not site.static]
    assert set(own) <= set(known)  # without pieces, nothing runs again
    statistics = from_ranges(prepared, measure_ranges(prepared, known, ()))
    assert statistics is not None
    file = _file(prepared, tmp_path / "a.onnx")
    qtrace.calibrate(prepared, [DATA], progress=False, statistics=statistics)
    qtrace.export(qtrace.convert(prepared), tmp_path / "a.onnx")
    assert (tmp_path / "a.onnx").read_bytes() == file


@pytest.mark.parametrize("function", [F.hswish, F.silu])
def test_pieces_of_one_function_do_not_get_the_ranges_of_another(function) -> None:
    """Pieces are named in the order in which they are written, so that a name is another one elsewhere."""
    layers = {"a": M.Conv2d(3, 16, 3), "b": M.Conv2d(16, 16, 3), "c": M.Conv2d(16, 4, 1)}
    layers["a"].weight[:], layers["b"].weight[:] = layers["a"].weight * 0.05, layers["b"].weight * 900
    module = net(lambda self, x: self.c(function(self.b(function(self.a(x))))), **layers)
    traced = qtrace.trace(module, DATA, check=False)
    config = as_qconfig({"placement": "balanced", "observers": {"activation": "minmax", "weight": "minmax"}})
    source = FloatSource(traced, config, [DATA])
    _, outcome = prepare_placed(traced, config, [DATA], source=source)
    assert outcome is not None
    names = list(outcome.point.labels)

    def place(on_integers) -> TracedModule:
        labels = {name: on_integers(number) for number, name in enumerate(names)}
        return prepare_placed(traced, config, [DATA], outcome=outcome.instead(labels), source=source)[0]

    both, second = place(lambda n: True), place(lambda n: n >= 2)
    assert source.facts is not None
    assert source.facts.measured is not None
    assert source.calls is not None
    for graph in (both, second):
        shared = measure_ranges(graph, source.facts.measured.ranges, source.calls)
        own = measure_ranges(graph, {}, source.calls)
        assert set(own) <= set(shared)
        assert not set(own) <= set(source.facts.measured.ranges)  # the pieces
        for name, limits in own.items():
            assert shared[name] == pytest.approx(limits, rel=1e-4, abs=1e-5), name


def test_ranges_are_not_enough_for_histograms_or_without_all_nodes() -> None:
    config = as_qconfig({"observers": {"activation": "percentile"}})
    prepared = qtrace.prepare(_traced(), config)
    names = [site.node.name for site in QuantizedModel(prepared).sites if not site.static]
    assert names
    assert from_ranges(prepared, dict.fromkeys(names, (-1.0, 1.0))) is None
    plain = qtrace.prepare(_traced(), {"observers": {"activation": "minmax"}})
    assert from_ranges(plain, {}) is None

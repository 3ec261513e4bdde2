"""The choice on the calibrated graph: what is switched off, what stays as it was, and what the rows say."""

from __future__ import annotations

from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.comparing.sums import sqnr_db
from qtrace.graph.flatten import flatten
from qtrace.preparation.figures import read_figures
from qtrace.preparation.model import QuantizedModel
from qtrace.preparation.passes import place as placing
from qtrace.preparation.passes.annotate import annotate_view
from qtrace.preparation.passes.choosing import _Chooser
from qtrace.preparation.passes.place import execute
from qtrace.preparation.placement.reference import MeasuredRun
from tests.nets import images, net, randomize

X = images(8, 16, 12, 12, seed=3)
CONFIG = {"placement": "balanced", "ptq": ["fuse_bn", "gptq", "bias_correction"]}


class Table:
    """Integer convolutions take ``share`` of the time in float, and functions of one value next to none."""

    def __init__(self, share: float = 0.3) -> None:
        self.share = share

    def seconds(self, op: object, form: str) -> float | None:
        if op.kind in ("quantize", "dequantize"):
            return 1e-6
        if op.kind == "reorder":
            return None
        if op.kind == "conv2d":
            return 1e-3 * (1.0 if form == "float" else self.share)
        return 1e-4 if form == "float" else 1e-5


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> Table:
    """The table that graphs are placed by."""
    times = Table()
    monkeypatch.setattr(placing.CostTable, "packaged", classmethod(lambda cls, runtime: {runtime: times}))
    monkeypatch.setattr(placing.CostTable, "nearest", classmethod(lambda cls, runtime, flags: runtime))
    return times


def _module(factor: float = 1.0) -> M.Module:
    """Of the channels between the first two layers one is ``factor`` times as large as the others."""

    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        return self.c(F.hswish(self.b(self.a(x)) * 0.1))

    module = randomize(net(forward, **{name: M.Conv2d(16, 16, 1) for name in "abc"}), 0)
    sizes = np.where(np.arange(16) == 3, factor, 1.0).astype(np.float32)
    module.a.weight._reset(module.a.weight.numpy() * sizes.reshape(16, 1, 1, 1))
    module.b.weight._reset(module.b.weight.numpy() / sizes.reshape(1, 16, 1, 1) ** 2)
    return module


def _calibrated(module: M.Module, config: Any = CONFIG, **options: Any) -> QuantizedModel:
    prepared = qtrace.prepare(qtrace.trace(module, X[:1], check=False), config, samples=[X])
    return QuantizedModel(qtrace.calibrate(prepared, [X[:4], X[4:]], progress=False, **options))


def _states(model: QuantizedModel) -> list[str]:
    return [note.state for note in model.annotation.notes if note.kind == "conv2d"]


def test_what_is_not_worth_its_noise_is_switched_off_with_its_own_weights() -> None:
    module = _module(3000.0)
    model = _calibrated(module)
    assert _states(model)[1:] != ["int", "int"]
    assert "int" in _states(model)
    placement = model.annotation.placement
    rows = {row.name: row for row in placement.rows}
    assert list(rows) == ["fastest", "balanced", "float"]
    assert placement.chosen == "balanced"
    assert rows["fastest"].speed > rows["balanced"].speed > rows["float"].speed == 1.0
    assert rows["fastest"].sqnr < 10 < rows["balanced"].sqnr
    assert rows["fastest"].bytes < rows["balanced"].bytes < rows["float"].bytes
    exact, own = module(mge.Tensor(X)).numpy(), qtrace.convert(model.module)(mge.Tensor(X)).numpy()
    assert sqnr_db(exact, own) == pytest.approx(rows["balanced"].sqnr, abs=3)
    trained = {name: value.numpy() for name, value in module.named_parameters()}
    for note in model.annotation.notes:
        if note.kind == "conv2d":
            same = np.array_equal(
                dict(model.float_tensors())[f"{note.path}.weight"].numpy(), trained[f"{note.path}.weight"]
            )
            assert same or note.state == "int"
            assert ("dB" in note.reason) == (note.state == "float")


def test_the_graph_is_as_it_was_calibrated_where_all_is_worth_its_noise() -> None:
    model = _calibrated(_module())
    whole = _calibrated(_module(), prefer="speed")
    assert _states(model) == ["int"] * 3
    assert [site.name for site in model.sites] == [site.name for site in whole.sites]
    assert all(
        site.qparams == other.qparams
        for site, other in zip(model.sites, whole.sites, strict=True)
        if site.plan
    )


@pytest.mark.parametrize(
    ("prefer", "count"), [("speed", 3), ("balanced", None), ("accuracy", 0), (None, None)]
)
def test_a_preference_takes_its_row(prefer: Any, count: int | None) -> None:
    model = _calibrated(_module(3000.0), prefer=prefer)
    assert model.annotation.placement.chosen == {"speed": "fastest", "accuracy": "float"}.get(
        prefer, "balanced"
    )
    integer = _states(model).count("int")
    assert integer == count if count is not None else 0 < integer < 3
    x = mge.Tensor(X)
    np.testing.assert_array_equal(qtrace.convert(model.module)(x).numpy(), model.module(x).numpy())


def test_rows_are_the_same_whichever_is_taken() -> None:
    configs = [{**CONFIG, "ptq": ["fuse_bn"], "placement": name} for name in ("balanced", "fastest")]
    models = [
        _calibrated(_module(3000.0), config, prefer=row) for config in configs for row in (None, "speed")
    ]
    models.append(_calibrated(_module(3000.0), configs[1], prefer="balanced"))
    placements = [model.annotation.placement for model in models]
    assert [placement.chosen for placement in placements] == ["balanced", *["fastest"] * 3, "balanced"]
    assert [placement.rows for placement in placements] == [placements[0].rows] * 5
    assert _states(models[4]) == _states(models[0])


def test_noise_counts_only_in_layers_whose_rule_says_so_where_the_others_are_to_be_fast(table: Table) -> None:
    table.share = 0.8
    rule = {"match": {"name": "c"}, "placement": "balanced"}
    mixed = {**CONFIG, "placement": "fastest", "rules": [rule]}
    assert _states(_calibrated(_module(30.0))) == ["float", "float", "int"]
    assert _states(_calibrated(_module(30.0), mixed)) == ["int"] * 3


def test_rules_win_over_the_choice() -> None:
    rules = [{"match": {"op": "conv2d"}, "quantize": True}]
    assert _states(_calibrated(_module(3000.0), {**CONFIG, "rules": rules})) == ["int"] * 3
    kept = [{"match": {"name": "a"}, "quantize": False}]
    assert _states(_calibrated(_module(), {**CONFIG, "rules": kept})) == ["float", "int", "int"]


@pytest.mark.parametrize(
    "changes", [{"placement": "small"}, {"rules": [{"match": {"name": "*"}, "quantize": True}]}]
)
def test_no_row_is_measured_where_nothing_is_to_be_chosen(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*_: object) -> None:
        raise AssertionError("a row was measured")

    monkeypatch.setattr(_Chooser, "measure", measure)
    model = _calibrated(_module(3000.0), {**CONFIG, **changes})
    assert model.annotation.placement.rows == ()
    assert _states(model) == ["int"] * 3


def test_layers_that_are_rounded_by_each_batch_take_no_part() -> None:
    rules = [{"match": {"name": "b"}, "method": "dynamic"}, {"match": {"name": "c"}, "method": "weight_only"}]

    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        return self.c(self.b(F.flatten(self.a(x), 1)))

    module = randomize(net(forward, a=M.Conv2d(16, 4, 1), b=M.Linear(576, 16), c=M.Linear(16, 8)), 0)
    config = {"placement": "balanced", "rules": rules}
    for prefer, state in (("speed", "int"), ("accuracy", "float")):
        model = _calibrated(module, config, prefer=prefer)
        assert _states(model) == [state]
        assert model.annotation.dynamic
        assert {site.name for site in model.sites if site.sort == "weight"} >= {"b_weight", "c_weight"}
        assert model.annotation.placement.rows[0].speed > 1.05


def test_the_choice_does_not_depend_on_the_size_of_batches() -> None:
    config = {"placement": "balanced", "ptq": []}
    prepared = [
        qtrace.prepare(qtrace.trace(_module(3000.0), X[:1], check=False), config, samples=[X])
        for _ in range(3)
    ]
    sizes = (1, 3, 8)
    rows = []
    for model, size in zip(prepared, sizes, strict=True):
        batches = [X[i : i + size] for i in range(0, 8, size)]
        qtrace.calibrate(model, batches, progress=False, held_back=batches)
        rows.append(QuantizedModel(model).annotation.placement.rows)
    assert rows[0] == rows[1] == rows[2]


@pytest.mark.parametrize("factor", [1.0, 3000.0])
def test_the_engine_changes_no_row(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    computed, compute = [], MeasuredRun.compute

    def keep_result(run: MeasuredRun, *arguments: Any) -> Any:
        computed.append(compute(run, *arguments))
        return computed[-1]

    monkeypatch.setattr(MeasuredRun, "compute", keep_result)
    fast = _calibrated(_module(factor), engine="onnxruntime").annotation.placement
    assert computed
    assert None not in computed
    slow = _calibrated(_module(factor), engine="megengine").annotation.placement
    assert fast.chosen == slow.chosen
    for own, other in zip(fast.rows, slow.rows, strict=True):
        assert own.sqnr == pytest.approx(other.sqnr, abs=0.1)
        assert (own.speed, own.bytes) == (other.speed, other.bytes)


def test_noise_is_measured_on_what_is_held_back() -> None:
    """Other values than those of the calibration leave the ranges."""
    inside, outside = (
        _calibrated(_module(), held_back=[factor * X]).annotation.placement.rows[0].sqnr for factor in (1, 4)
    )
    assert outside < inside - 6


def test_a_switched_graph_is_saved_loaded_exported_and_verified(tmp_path: Any) -> None:
    model = _calibrated(_module(3000.0))
    qtrace.save(model.module, tmp_path / "m.mge")
    loaded = qtrace.load(tmp_path / "m.mge")
    assert QuantizedModel(loaded).annotation == model.annotation
    converted = qtrace.convert(loaded)
    qtrace.export(converted, tmp_path / "m.onnx")
    assert qtrace.verify(tmp_path / "m.onnx", converted, [X]).passed


def test_the_graph_that_was_annotated_is_found_again_without_its_sites() -> None:
    """The same labels give the same annotation, but for the reasons of the noise."""
    prepared = qtrace.prepare(
        qtrace.trace(_module(), X[:1], check=False), {"placement": "balanced"}, samples=[X]
    )
    qtrace.calibrate(prepared, [X], progress=False, prefer="speed")
    model = QuantizedModel(prepared)
    chooser = _Chooser(model, flatten(prepared), [((mge.Tensor(X),), {})])
    placed = execute(chooser.view, chooser.chains, chooser.problem, chooser.point, model.annotation.placement)
    view = placed.view(chooser.base, chooser.config)
    again = annotate_view(view, chooser.config, model.annotation.placement)
    assert (again.sites, again.carried, again.factors) == (
        model.annotation.sites,
        model.annotation.carried,
        model.annotation.factors,
    )
    assert [(n.name, n.state, n.output, n.ranks) for n in again.notes] == [
        (n.name, n.state, n.output, n.ranks) for n in model.annotation.notes
    ]


def test_bytes_of_weights_are_rounded_up() -> None:
    module = net(lambda self, x: self.a(x), a=M.Conv2d(3, 1, 1, bias=False))
    traced = qtrace.trace(module, images(1, 3, 4, 4), check=False)
    prepared = qtrace.prepare(traced, {"backend": "generic", "weight": {"bits": 4}})
    assert read_figures(prepared).bytes == 2  # of 12 bits

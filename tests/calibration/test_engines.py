"""Engines: both give the same parameters, and `auto` takes the one that applies and says why."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.calibration import choice
from qtrace.calibration.base import EngineError, watched
from qtrace.calibration.collecting import CollectOptions, collect
from qtrace.calibration.engines import MegEngine, OnnxRuntime
from qtrace.errors import CalibrationError, ConfigError
from qtrace.graph.interpreter import Interpreter
from qtrace.graph.open_axes import OpenAxes, OpenAxis, write_open_axes
from qtrace.graph.types import TracedModule
from qtrace.preparation import faithfulness
from qtrace.preparation.model import QuantizedModel, fake_quants
from qtrace.preparation.phases import in_phase
from tests.each import each_of
from tests.nets import Chain, images, net
from tests.zoo.catalog import CNN

_ZOO = ("mobilenet_v2_relu6", "se_resnet_bottleneck", "shufflenet_v2", "densenet")
_X = images(4, 3, 16, 16)


def _prepared(module: M.Module, example: Any = _X, qconfig: Any = None) -> TracedModule:
    return qtrace.prepare(qtrace.trace(module, example, check=False), qconfig)


def _assert_close(first: TracedModule, second: TracedModule) -> None:
    pairs = list(zip(fake_quants(first), fake_quants(second), strict=True))
    assert pairs
    for a, b in pairs:
        mine, theirs = a.qparams(), b.qparams()
        np.testing.assert_allclose(mine.scale, theirs.scale, rtol=2e-4, err_msg=a.site)
        assert np.abs(mine.zero_point - theirs.zero_point).max() <= 1, a.site
        assert a.observer is not None
        assert b.observer is not None
        assert a.observer.state_dict()["batches"] == b.observer.state_dict()["batches"], a.site


_SLOW = (
    "csp_darknet",
    "unet_transposed",
    "efficientnet_b0",
    "hrnet",
    "repvgg_train",
    "convnext",
    "deeplab",
    "edsr",
)


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", [*_ZOO, *(pytest.param(n, marks=pytest.mark.slow) for n in _SLOW)])
def test_both_engines_give_the_same_parameters(name: str) -> None:
    entry = next(e for e in CNN if e.name == name)
    batches = [images(2, *entry.input_shape, seed=i) for i in range(2)]
    traced = qtrace.trace(entry.build(), batches[0], check=False)
    recipe = {"observers": {"activation": "percentile" if name == "densenet" else "minmax"}}
    results = [
        qtrace.calibrate(qtrace.prepare(traced, recipe), batches, progress=False, engine=engine)
        for engine in ("megengine", "onnxruntime")
    ]
    _assert_close(results[0], results[1])


def test_kept_batch_norms_computed_weights_and_tied_constants_are_the_same() -> None:
    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        y = self.bn(self.conv(x))
        weight = self.raw - F.mean(self.raw, axis=[1, 2, 3], keepdims=True)
        y = F.conv2d(y, weight)
        return self.last(F.concat([y, self.table], axis=1))

    def build() -> M.Module:
        return net(
            forward,
            conv=M.Conv2d(3, 4, 1),
            bn=M.BatchNorm2d(4),
            raw=mge.Parameter(images(5, 4, 1, 1)),
            table=mge.Parameter(images(4, 2, 16, 16)),
            last=M.Conv2d(7, 2, 1),
        )

    results = []
    for engine in ("megengine", "onnxruntime"):
        prepared = _prepared(build(), qconfig={"qat": {"bn": {"fold": False}}})
        results.append(qtrace.calibrate(prepared, [_X, _X * 2], progress=False, engine=engine))
    _assert_close(*results)


def test_values_are_those_that_the_phase_observe_records() -> None:
    prepared = _prepared(Chain(2, 3))
    qtrace.set_phase(prepared, "observe")
    prepared.eval()
    for index, batch in enumerate((_X, _X + 1)):
        for fq in fake_quants(prepared):
            fq.batch = index
        prepared(mge.Tensor(batch))
    expected = [fq.observer.state_dict() for fq in fake_quants(prepared) if fq.observer]
    qtrace.calibrate(prepared, [_X, _X + 1], progress=False, engine="megengine")
    for fq, state in zip(fake_quants(prepared), expected, strict=True):
        assert fq.observer is not None
        mine = fq.observer.state_dict()
        assert mine.keys() == state.keys()
        for key, value in state.items():
            np.testing.assert_array_equal(mine[key], value, err_msg=f"{fq.site} {key}")


def _auto(prepared: TracedModule, batches: list[Any], count: int | None = None) -> choice.Chosen:
    options = CollectOptions(batches=len(batches) if count is None else count)
    return collect(prepared, enumerate(batches), options).chosen


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """However little there is to compute, an export is worth it."""
    monkeypatch.setattr(choice, "_MIN_MACS_FOR_EXPORT", 0)


@pytest.mark.usefixtures("eager")
def test_auto_takes_onnxruntime_where_it_agrees() -> None:
    chosen = _auto(_prepared(Chain(3, 3)), [_X, _X])
    assert chosen.name == "onnxruntime"
    assert "agrees with MegEngine" in chosen.reason
    assert chosen.verified == (((4, 3, 16, 16),),)


def test_auto_stays_with_megengine_for_little_work() -> None:
    assert _auto(_prepared(Chain(1, 3)), [_X, _X]).name == "megengine"


def test_auto_counts_the_samples_of_the_batches_not_those_of_the_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepared = _prepared(Chain(1, 3), _X[:1])
    macs = sum(note.macs for note in QuantizedModel(prepared).annotation.notes)
    monkeypatch.setattr(choice, "_MIN_MACS_FOR_EXPORT", 8 * macs)
    assert _auto(prepared, [_X[:3], _X[:3]]).name == "megengine"
    assert _auto(prepared, [_X, _X]).name == "onnxruntime"
    assert _auto(prepared, [np.concatenate([_X, _X])]).name == "onnxruntime"  # eight samples in one batch
    wide = images(1, 3, 32, 32)  # four times the pixels: enough, but the export has the size of the trace
    assert "so little" not in _auto(prepared, [wide, wide]).reason


def test_auto_without_a_batch_is_a_choice_for_the_shapes_of_the_trace() -> None:
    assert _auto(_prepared(Chain(1, 3)), []).name == "megengine"


def _missing(*_: Any, **__: Any) -> None:
    raise EngineError("the package onnxruntime is not installed")


@pytest.mark.usefixtures("eager")
def test_auto_says_why_onnxruntime_does_not_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = net(lambda self, x: F.svd(self.c(x))[1], c=M.Conv2d(3, 4, 1))
    chosen = _auto(_prepared(unknown), [_X, _X])
    assert chosen.name == "megengine"
    assert "cannot become ONNX" in chosen.reason
    monkeypatch.setattr(choice, "OnnxRuntime", _missing)
    assert "not installed" in _auto(_prepared(Chain(1, 3)), [_X, _X]).reason


class _Wrong(OnnxRuntime):
    """A runtime that computes one value otherwise."""

    def run(self, arguments: Any, index: int, observe: Callable[[str, np.ndarray], None]) -> None:
        super().run(arguments, index, lambda node, value: observe(node, value * np.float32(1.001)))


@pytest.mark.usefixtures("eager")
def test_auto_does_not_use_a_runtime_that_disagrees(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = qtrace.trace(Chain(2, 3), _X, check=False)
    plain = qtrace.calibrate(qtrace.prepare(traced), [_X, _X], progress=False, engine="megengine")
    monkeypatch.setattr(choice, "OnnxRuntime", _Wrong)
    chosen = _auto(qtrace.prepare(traced), [_X, _X])
    assert chosen.name == "megengine"
    assert "differs by 1.0e-03 of its range" in chosen.reason
    auto = qtrace.calibrate(qtrace.prepare(traced), [_X, _X], progress=False)
    for a, b in zip(fake_quants(plain), fake_quants(auto), strict=True):
        np.testing.assert_array_equal(a.qparams().scale, b.qparams().scale)


class _Seen(MegEngine):
    """Keeps how many samples it was given."""

    samples: list[int] = []

    def run(self, arguments: Any, index: int, observe: Callable[[str, np.ndarray], None]) -> None:
        self.samples.append(len(arguments[0][0]))
        super().run(arguments, index, observe)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    ("forward", "traced", "compared"),
    [
        (lambda self, x: self.c(x), 4, [2]),
        (lambda self, x: self.c(x), 2, [3]),  # else what stands for the number of samples may be a constant
        (lambda self, x: self.c(x).reshape(4, -1, 8), 4, [4]),  # two samples would be four rows, too
        (lambda self, x: self.c(x) * self.each, 4, [4]),  # takes four samples only
    ],
)
def test_engines_are_compared_on_few_samples_where_the_graph_takes_them(
    forward: Any, traced: int, compared: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = net(forward, c=M.Conv2d(3, 4, 1), each=mge.Parameter(images(4, 1, 1, 1)))
    prepared = qtrace.prepare(qtrace.trace(module, _X[:traced], check=False))
    monkeypatch.setattr(choice, "MegEngine", _Seen)
    monkeypatch.setattr(_Seen, "samples", [])
    chosen = _auto(prepared, [_X, _X + 1])
    assert (chosen.name, chosen.verified) == ("onnxruntime", (((4, 3, 16, 16),),))
    assert _Seen.samples == compared
    monkeypatch.setattr(choice, "OnnxRuntime", _Wrong)
    assert _auto(prepared, [_X, _X + 1]).name == "megengine"


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    ("forward", "batch"),
    [
        (lambda self, x: self.c(F.concat([x[2:], x[2:]])), _X),  # of two samples nothing is left
        (lambda self, x: F.relu(self.c(x * x)), np.concatenate([0 * _X[:2], _X[2:]])),
    ],
)
def test_values_that_say_nothing_do_not_agree(
    forward: Any, batch: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Behind(OnnxRuntime):
        def run(self, arguments: Any, index: int, observe: Callable[[str, np.ndarray], None]) -> None:
            wrong = np.float32(1.001)
            super().run(arguments, index, lambda n, value: observe(n, value if n == "x" else value * wrong))

    module = net(forward, c=M.Conv2d(3, 4, 1, bias=False))
    prepared = qtrace.prepare(qtrace.trace(module, _X, check=False))
    assert _auto(prepared, [batch, batch]).name == "onnxruntime"
    monkeypatch.setattr(choice, "OnnxRuntime", Behind)
    assert _auto(prepared, [batch, batch]).name == "megengine"


@pytest.mark.usefixtures("eager")
def test_engines_are_compared_on_the_middle_of_a_large_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """All activations of an image of 1760x1760 were in memory: 5 GB for a small detector."""
    monkeypatch.setattr(faithfulness, "_CUT_SIDE", 16)
    ran, plain = list[tuple[int, ...]](), MegEngine.run

    def run(engine: MegEngine, arguments: Any, index: int, observe: Callable[..., None]) -> None:
        ran.append(tuple(arguments[0][0].shape))
        plain(engine, arguments, index, observe)

    monkeypatch.setattr(MegEngine, "run", run)
    traced = qtrace.trace(Chain(1, 3), _X, check=False)
    write_open_axes(traced, OpenAxes(tuple(OpenAxis("x", axis, "NCHW"[axis], "") for axis in (0, 2, 3))))
    large = images(1, 3, 40, 24)
    chosen = _auto(qtrace.prepare(traced), [large, large])
    assert (chosen.name, chosen.verified) == ("onnxruntime", (((1, 3, 40, 24),),))
    assert ran == [(1, 3, 16, 16)]


@pytest.mark.usefixtures("eager")
def test_a_batch_that_is_refused_after_its_part_agreed_is_observed_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A graph in several parts may be refused after values of the first one were observed."""

    class Refusing(OnnxRuntime):
        def run(self, arguments: Any, index: int, observe: Callable[[str, np.ndarray], None]) -> None:
            whole = len(arguments[0][0]) == 4
            for node, value in self._values(arguments, index).items():
                observe(node, value)
                if whole:
                    raise EngineError("the second part takes no four samples")

        def _values(self, arguments: Any, index: int) -> dict[str, np.ndarray]:
            values = dict[str, np.ndarray]()
            super().run(arguments, index, values.__setitem__)
            return values

    prepared = _prepared(Chain(3, 3))
    expected = collect(prepared, enumerate([_X]), CollectOptions("megengine")).statistics
    monkeypatch.setattr(choice, "OnnxRuntime", Refusing)
    once = collect(prepared, enumerate([_X]), CollectOptions("auto", batches=2))
    assert "the second part takes no four samples" in once.chosen.reason
    for group, observer in expected.observers.items():
        own = once.statistics.observers[group].state_dict()
        assert own["batches"] == observer.state_dict()["batches"]


@pytest.mark.usefixtures("eager")
def test_where_the_first_batch_is_refused_no_other_takes_another_engine() -> None:
    """Workers and resumed runs are told the engine of the first batch; all must end in the same bits."""
    prepared = qtrace.prepare(qtrace.trace(Chain(3, 3), _X, check=False))
    pairs = list(enumerate([images(4, 3, 24, 20), *(images(4, 3, 16, 16, seed=i) for i in (1, 2, 3))]))
    once = collect(prepared, pairs, CollectOptions(batches=4))
    begun = collect(prepared, pairs[:1], CollectOptions(batches=4))
    resumed = collect(prepared, pairs[1:], CollectOptions(begun.chosen), start=begun.statistics)
    assert once.chosen == begun.chosen == resumed.chosen
    assert once.chosen.name == "megengine"
    assert once.statistics.observers.keys() == resumed.statistics.observers.keys()
    for group, observer in once.statistics.observers.items():
        other = resumed.statistics.observers[group].state_dict()
        for key, value in observer.state_dict().items():
            np.testing.assert_array_equal(value, other[key], err_msg=f"{group} {key}")


@pytest.mark.usefixtures("eager")
def test_one_batch_takes_onnxruntime_if_a_part_of_it_can_be_compared() -> None:
    assert _auto(_prepared(Chain(3, 3)), [_X]).name == "onnxruntime"
    few = _auto(_prepared(Chain(3, 3), _X[:2]), [_X[:2]])
    assert few.name == "megengine"
    assert "one batch" in few.reason


@pytest.mark.usefixtures("eager")
def test_batches_of_another_shape_are_compared_or_run_in_megengine() -> None:
    batches = [_X, _X[:1], images(1, 3, 24, 8)]
    traced = qtrace.trace(Chain(2, 3), _X, check=False)
    prepared = qtrace.prepare(traced)
    chosen = _auto(prepared, batches)
    assert chosen.name == "onnxruntime"
    assert chosen.verified == (((4, 3, 16, 16),), ((1, 3, 16, 16),))
    assert "MegEngine runs batches of some other shapes" in chosen.reason
    with pytest.raises(
        CalibrationError, match="batch 2: onnxruntime refuses the batch.*use engine megengine"
    ):
        qtrace.calibrate(prepared, batches, progress=False, engine="onnxruntime")
    own = qtrace.calibrate(qtrace.prepare(traced), batches, progress=False, engine="megengine")
    _assert_close(own, qtrace.calibrate(prepared, batches, progress=False))


def test_an_engine_that_cannot_run_the_graph_is_reported() -> None:
    unknown = net(lambda self, x: F.svd(self.c(x))[1], c=M.Conv2d(3, 4, 1))
    with pytest.raises(
        CalibrationError, match="engine onnxruntime does not apply: the graph cannot become ONNX"
    ):
        qtrace.calibrate(_prepared(unknown), [_X], progress=False, engine="onnxruntime")
    with pytest.raises(ConfigError, match="unknown engine 'torch': choose one of auto, megengine"):
        qtrace.calibrate(_prepared(unknown), [_X], progress=False, engine="torch")


@pytest.mark.parametrize("engine", ["megengine", "onnxruntime"])
def test_a_value_that_is_not_finite_is_reported_with_site_and_batch(engine: str) -> None:
    prepared = _prepared(net(lambda self, x: self.c(x / F.mean(x)), c=M.Conv2d(3, 4, 1)))
    with pytest.raises(CalibrationError, match="site .*, batch 1: it holds NaN"):
        qtrace.calibrate(prepared, [_X, _X * 0], progress=False, engine=engine)
    assert {fq.phase for fq in fake_quants(prepared)} == {"float"}


@pytest.mark.parametrize("engine", ["megengine", "onnxruntime"])
def test_a_nan_in_the_data_is_refused_where_no_site_sees_it(engine: str) -> None:
    module = net(lambda self, x: self.c(F.where(x > 0, x, F.zeros_like(x))), c=M.Conv2d(3, 4, 1))
    rule = {"match": {"op": "where"}, "quantize": False}
    prepared = _prepared(module, qconfig=qtrace.QConfig(backend="onnxruntime", rules=[rule]))
    spoiled = _X.copy()
    spoiled[2, 1, 0, 0] = np.nan
    place = r"batch 1 holds NaN, which is no integer, first in input 0 at \[2, 1, 0, 0\] \(sample 2\)"
    with pytest.raises(CalibrationError, match=place):
        qtrace.calibrate(prepared, [_X, spoiled], progress=False, engine=engine)
    assert {fq.phase for fq in fake_quants(prepared)} == {"float"}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_the_place_of_a_bad_value_in_the_data_is_named(bad: float) -> None:
    module = net(lambda self, x, y: self.c(x + y), c=M.Conv2d(3, 4, 1))
    spoiled = _X.copy()
    spoiled[1, 2, 0, 1] = bad
    traced = qtrace.trace(module, mge.tensor(_X), mge.tensor(_X), check=False)
    prepared = qtrace.prepare(traced, "onnxruntime")
    with pytest.raises(CalibrationError, match=r"batch 1.* at \[1, 2, 0, 1\] \(sample 1\)") as caught:
        qtrace.calibrate(prepared, [{"x": _X, "y": _X}, {"x": _X, "y": spoiled}], progress=False)
    assert "first in input y" in str(caught.value) or "first in input 1" in str(caught.value)


@pytest.mark.parametrize("engine", ["megengine", "onnxruntime"])
def test_an_output_behind_the_last_site_that_is_not_finite_is_named_with_its_origin(engine: str) -> None:
    def forward(self: M.Module, x: mge.Tensor) -> tuple[mge.Tensor, mge.Tensor]:
        y = self.c(x)
        return y, F.log(y - F.min(y) + self.least) * 2.0

    module = net(forward, c=M.Conv2d(3, 4, 1), least=mge.Tensor(np.float32(0.5)))
    prepared = _prepared(module)
    prepared.least._reset(mge.Tensor(np.float32(-0.5)))
    with pytest.raises(CalibrationError) as caught:
        qtrace.calibrate(prepared, [_X], progress=False, engine=engine)
    line = inspect.getsourcelines(forward)[1] + 2
    origin = re.escape(f"log_out (F.log, tests/calibration/test_engines.py:{line}) gives first")
    assert re.fullmatch(
        f"output mul_out, batch 0: it holds NaN or infinity, which {origin}: repair the data or the model.",
        str(caught.value).replace("F.elemwise.", "F."),
    ), str(caught.value)
    assert {fq.phase for fq in fake_quants(prepared)} == {"float"}


@pytest.mark.parametrize("engine", ["megengine", "auto"])
def test_a_softmax_at_the_end_that_megengine_computes_wrong_is_named(engine: str, eager: None) -> None:
    module = net(
        lambda self, x: F.softmax(self.c(x) - self.shift), c=M.Conv2d(3, 4, 1), shift=mge.Tensor([0.0])
    )
    prepared = _prepared(module)
    prepared.shift._reset(mge.Tensor([200.0]))
    with pytest.raises(CalibrationError, match=r"output softmax_out, batch 0: .*F.softmax\(x - F.max"):
        qtrace.calibrate(prepared, [_X, _X], progress=False, engine=engine)


@each_of("engine", ["megengine", "onnxruntime"])
@each_of("number", [-np.inf, np.nan])
def test_infinity_or_nan_that_masks_an_output_is_no_error(number: float, engine: str) -> None:
    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        y = self.c(x)
        return F.where(y > 0, y, F.full(y.shape, float(number))) * 2.0

    prepared = _prepared(net(forward, c=M.Conv2d(3, 4, 1)))
    qtrace.calibrate(prepared, [_X], progress=False, engine=engine)
    assert (~np.isfinite(prepared(mge.Tensor(_X)).numpy())).any()
    assert {fq.phase for fq in fake_quants(prepared)} == {"quantize"}


def test_the_engine_and_the_reason_are_logged(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared = _prepared(net(lambda self, x: self.c(x), c=M.Conv2d(3, 4, 1)))
    with caplog.at_level("INFO", "qtrace"):
        qtrace.calibrate(prepared, [_X], engine="megengine")
    assert [r.getMessage() for r in caplog.records if r.name == "qtrace"] == ["engine megengine: as asked"]
    assert "as asked" not in capsys.readouterr().err


def test_parts_see_the_same_values_when_memory_is_short() -> None:
    prepared = _prepared(Chain(5, 3))
    nodes = tuple(watched(QuantizedModel(prepared)).nodes)
    found: list[dict[str, np.ndarray]] = []
    for limit in (1 << 30, 1):
        values: dict[str, np.ndarray] = {}
        engine = OnnxRuntime(prepared, nodes, limit=limit)
        assert len(engine._split(_X)) == (1 if limit > 1 else len(nodes))
        engine.run(((mge.Tensor(_X),), {}), 0, values.__setitem__)
        found.append(values)
    assert tuple(found[0]) == tuple(found[1]) == nodes
    for node in nodes:
        np.testing.assert_allclose(found[0][node], found[1][node], rtol=1e-5, atol=1e-6)


def test_a_site_before_an_op_in_place_is_seen_as_it_was() -> None:
    """`y += x` writes into the Tensor that the site is read from while the next op is under way."""

    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        y = self.conv(x)
        y += 100.0 * x
        return y

    module = net(forward, conv=M.Conv2d(3, 3, 1))
    x = images(2, 3, 8, 8)
    prepared = qtrace.prepare(qtrace.trace(module, x, check=False), {"observers": {"activation": "minmax"}})
    qtrace.calibrate(prepared, [x], progress=False, engine="megengine")
    qparams = prepared.qsites.conv_out.qparams()
    lo, hi = ((end - float(qparams.zero_point)) * float(qparams.scale) for end in (0, 255))
    seen = module.conv(mge.Tensor(x)).numpy()
    step = float(qparams.scale)
    assert abs(lo - min(seen.min(), 0)) <= step
    assert abs(hi - max(seen.max(), 0)) <= step


@pytest.mark.parametrize("engine", ["megengine", "onnxruntime"])
def test_a_fault_in_an_observer_is_not_taken_for_a_batch_that_does_not_fit(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = _prepared(Chain(3, 3))

    def faulty(*args: Any, **kwargs: Any) -> None:
        raise ValueError("a fault of the observer's own")

    monkeypatch.setattr("qtrace.observers.minmax.MinMax._measure", faulty)
    with pytest.raises(ValueError, match=r"^a fault of the observer's own$"):
        qtrace.calibrate(prepared, [_X], progress=False, engine=engine)


def _keeping(shown: dict[str, np.ndarray]) -> Callable[[str, Any], None]:
    return lambda name, value: shown.update({name: value.copy()})


def test_views_are_observed_when_they_are_whole() -> None:
    class Last(M.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.fc = M.LSTM(16, 64, batch_first=True), M.Linear(64, 1024)
            self.more = M.Linear(1024, 1024)  # so much that a late copy would come too late

        def forward(self, x: mge.Tensor) -> mge.Tensor:
            y = self.fc(self.lstm(x)[0][:, -1])
            for _ in range(4):
                y = self.more(y)
            return y

    x = images(32, 40, 16)
    prepared = _prepared(Last(), x, {"observers": {"activation": "minmax"}})
    seen: dict[str, np.ndarray] = {}

    class Plain(Interpreter):
        def on_node(self, node: Any, value: Any) -> Any:
            if node.name in nodes:
                mge._full_sync()
                seen[node.name] = value.numpy().copy()
            return value

    nodes = watched(QuantizedModel(prepared)).nodes
    with in_phase(prepared, "float"):
        Plain(prepared).run(mge.Tensor(x))
        for _ in range(3):
            shown: dict[str, np.ndarray] = {}
            MegEngine(prepared, nodes).run(((mge.Tensor(x),), {}), 0, _keeping(shown))
            assert shown.keys() == seen.keys()
            for name, value in shown.items():
                np.testing.assert_array_equal(value, seen[name], err_msg=name)

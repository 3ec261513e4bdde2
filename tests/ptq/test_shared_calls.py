"""Layers that are called for several levels: one rounding and one bias, by all their calls."""

from __future__ import annotations

from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace import QConfig
from qtrace.fakequant.following.bias import BIAS_LIMIT
from qtrace.graph.interpreter import Interpreter
from qtrace.preparation.model import read_record
from qtrace.ptq.layers.quantized import QuantizedLayer, quantized_layers
from qtrace.ptq.layers.scaling import move_bias
from tests.nets import images, left_lines, net

BATCHES = [images(8, 4, 16, 16, seed=s) for s in range(2)]
OTHERS = [images(8, 4, 16, 16, seed=100 + s) for s in range(2)]
REFIT = {"gptq": {"refit": True}}


def _pyramid(bias: bool = True) -> M.Module:
    """Three levels of features, and a tower of two convolutions with a prediction, the same for all."""

    def forward(self: M.Module, x: Any) -> Any:
        fine = F.relu(self.stem(x))
        middle = F.relu(self.down(fine))
        coarse = F.avg_pool2d(middle, 2)
        coarse += 0.5
        outputs = []
        for level in (fine, middle, coarse):
            outputs.append(self.score(F.relu(self.conv2(F.relu(self.conv1(level))))))
        return tuple(outputs)

    return net(
        forward,
        stem=M.Conv2d(4, 6, 3, padding=1),
        down=M.Conv2d(6, 6, 3, 2, padding=1),
        conv1=M.Conv2d(6, 6, 3, padding=1, bias=bias),
        conv2=M.Conv2d(6, 6, 3, padding=1, bias=bias),
        score=M.Conv2d(6, 3, 1, bias=bias),
    )


def _prepared(module: M.Module, *ptq: Any, batches: Any = BATCHES, bits: tuple[int, int] = (4, 8)) -> Any:
    """With so many bits for weights and activations; the outputs stay float."""
    rules = [{"match": {"position": "last"}, "quantize_output": False, "optional": True}]
    config = QConfig(
        backend="generic",
        weight={"bits": bits[0], "axis": 0},
        activation={"bits": bits[1]},
        ptq=ptq,
        rules=rules,
    )
    prepared = qtrace.prepare(qtrace.trace(module, batches[0], check=False), config)
    return qtrace.calibrate(prepared, batches, progress=False)


def _values(model: Any, phase: str, names: list[str], batches: Any) -> dict[str, np.ndarray]:
    """What the nodes of these names hold over all batches, each (channels, rest)."""
    qtrace.set_phase(model, phase)
    values: dict[str, list[np.ndarray]] = {n: [] for n in names}

    class Keep(Interpreter):
        def on_node(self, node: Any, value: Any) -> Any:
            if node.name in values:
                values[node.name].append(value.numpy().astype(np.float64))
            return value

    for batch in batches:
        Keep(model).run(mge.Tensor(batch))
    return {n: np.concatenate(v).swapaxes(0, 1).reshape(v[0].shape[1], -1) for n, v in values.items()}


def _steps(layer: QuantizedLayer) -> list[np.ndarray]:
    """What each call of a layer rounds its bias to multiples of, (channels,)."""
    scales = []
    for call in layer.calls:
        assert call.bias is not None
        activation, weight = (node.owner for node in call.bias.expr.args[2:])
        scales.append((activation.qparams().scale.astype(np.float64) * weight.qparams().scale).reshape(-1))
    return scales


def _noise(module: M.Module, model: Any) -> float:
    qtrace.set_phase(model, "quantize")
    errors = []
    for x in map(mge.Tensor, OTHERS):
        errors += [(w.numpy() - h.numpy()).reshape(-1) for w, h in zip(module(x), model(x), strict=True)]
    return float(np.mean(np.square(np.concatenate(errors), dtype=np.float64)))


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("ptq", "bias"), [((REFIT,), True), (("bias_correction",), False), ((REFIT, "bias_correction"), False)]
)
def test_no_channel_has_a_mean_error_over_all_levels(ptq: tuple[Any, ...], bias: bool) -> None:
    module = _pyramid(bias)
    plain, corrected = _prepared(module), _prepared(module, *ptq)
    worked_on = quantized_layers(corrected, shared=True)[0]
    calls = {layer.weight: [c.out.name for c in layer.calls] for layer in worked_on}
    assert [len(names) for names in calls.values()] == [1, 1, 3, 3, 3]
    everything = [name for names in calls.values() for name in names]
    references = _values(plain, "float", everything, BATCHES)
    outputs = _values(corrected, "quantize", everything, BATCHES)
    before = _values(plain, "quantize", everything, BATCHES)
    for layer, names in zip(worked_on, calls.values(), strict=True):
        errors = (
            np.concatenate([references[n] - other[n] for n in names], axis=1) for other in (outputs, before)
        )
        left, uncorrected = (np.abs(error.mean(axis=1)).max() for error in errors)
        assert left < np.max(_steps(layer))
        assert len(names) == 1 or left < 0.25 * uncorrected
    report = read_record(corrected).ptq[-1]
    assert [e["site"] for e in report["errors"]] == [names[0] for names in calls.values()]
    assert not left_lines(report)
    assert f"{calls['conv1.weight'][0]} and 2 more calls: " in " ".join(report["changed"])


@pytest.mark.quick(1)
@pytest.mark.parametrize(("name", "ptq"), [("gptq", REFIT), ("bias_correction", "bias_correction")])
def test_other_data_have_less_noise_than_if_shared_layers_were_left(
    monkeypatch: pytest.MonkeyPatch, name: str, ptq: Any
) -> None:
    module = _pyramid()
    noise = _noise(module, _prepared(module, ptq))
    monkeypatch.setattr(f"qtrace.ptq.{name}.quantized_layers", lambda model, shared: quantized_layers(model))
    left = _prepared(module, ptq)
    assert sum("is shared with another call" in line for line in left_lines(read_record(left).ptq[0])) == 9
    assert noise < 0.9 * _noise(module, left)


@pytest.mark.quick(1)
@pytest.mark.parametrize("ptq", [("bias_correction",), ("gptq",), (REFIT,)])
@pytest.mark.parametrize("kind", ["conv2d", "linear"])
def test_two_calls_are_one_call_on_their_inputs_joined(ptq: tuple[Any, ...], kind: str) -> None:
    pairs = [
        np.concatenate([images(2, 4, 8, 8, seed=s), 2 * images(2, 4, 8, 8, seed=9 + s)]) for s in range(3)
    ]
    if kind == "linear":
        pairs = [pair.reshape(4, 32, 8) for pair in pairs]
    layer: Any = M.Conv2d(4, 6, 3, padding=1) if kind == "conv2d" else M.Linear(8, 6)

    def twice(self: M.Module, x: Any) -> Any:
        x = F.relu(x)
        return F.concat([self.layer(x[:2]), self.layer(x[2:])])

    shared = _prepared(net(twice, layer=layer), *ptq, batches=pairs)
    single = _prepared(net(lambda self, x: self.layer(F.relu(x)), layer=layer), *ptq, batches=pairs)
    calls = [
        len(quantized_layer.calls)
        for model in (shared, single)
        for quantized_layer in quantized_layers(model, shared=True)[0]
    ]
    assert calls == [2, 1]
    assert read_record(single).ptq[0]["changed"]
    for name in ("weight", "bias"):
        one, two = (getattr(model.layer, name).numpy() for model in (single, shared))
        np.testing.assert_allclose(two, one, atol=2e-5)
    if ptq != ("gptq",):
        assert np.abs(shared.layer.bias.numpy() - layer.bias.numpy()).max() > 1e-4


def test_large_maps_count_by_their_size_though_few_places_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """One place of four of the first map tells all of it; the second map is read as a whole."""

    def forward(self: M.Module, x: Any) -> Any:
        x = F.relu(x)
        return self.a(x), self.a(F.avg_pool2d(x, 4) * 3)

    monkeypatch.setattr("qtrace.ptq.layers.statistics._LONG_ROW", 1)
    monkeypatch.setattr("qtrace.ptq.layers.statistics._LEAST_ROWS", 1 << 20)  # the samples are few
    batches = [np.repeat(images(4, 4, 16, 4, seed=s), 4, axis=3) for s in range(3)]

    def fitted(places: int) -> Any:
        ptq = {"gptq": {"refit": True, "places": places}}
        model = _prepared(net(forward, a=M.Conv2d(4, 6, 1)), ptq, batches=batches, bits=(8, 4))
        return model.a.weight.numpy()

    by_64, by_256 = fitted(64), fitted(256)
    np.testing.assert_allclose(by_64, by_256, atol=2e-5)
    monkeypatch.setattr("qtrace.ptq.layers.statistics.spacing", lambda *_: 1)
    assert np.abs(fitted(64) - by_256).max() > 1e-3


@pytest.mark.quick(1)
@pytest.mark.parametrize("ptq", [(REFIT,), ("bias_correction",)])
def test_shared_calls_that_depend_on_each_other_are_left(ptq: tuple[Any, ...]) -> None:
    def forward(self: M.Module, x: Any) -> Any:
        y = self.b(F.relu(self.a(x)))
        return self.a(F.relu(self.b(F.relu(x)))), y, self.c(y), self.c(x)

    def step() -> M.Module:
        return M.Conv2d(4, 4, 3, padding=1, bias=False)

    module = net(forward, a=step(), b=step(), c=M.Conv2d(4, 4, 1))
    plain, corrected = _prepared(module), _prepared(module, *ptq)
    left = [line for line in left_lines(read_record(corrected).ptq[0]) if "wait for each other" in line]
    # Of two such layers the first can be worked on.
    assert len(left) == 2
    assert all("b.weight" in line for line in left)
    np.testing.assert_array_equal(corrected.b.weight.numpy(), plain.b.weight.numpy())
    assert np.abs(corrected.a.bias.numpy()).max() > 0
    assert np.abs(corrected.c.bias.numpy() - plain.c.bias.numpy()).max() > 0


def test_a_recurrent_layer_is_left_and_the_model_unchanged() -> None:
    def forward(self: M.Module, x: Any) -> Any:
        for _ in range(3):
            x = F.relu(self.a(x))
        return x

    module = net(forward, a=M.Conv2d(4, 4, 3, padding=1, bias=False))
    plain, corrected = _prepared(module), _prepared(module, REFIT, "bias_correction")
    for report in read_record(corrected).ptq:
        assert len(left_lines(report)) == 3
        assert not report["changed"]
        assert all("a.weight is shared by calls that have to wait" in line for line in left_lines(report))
    before = {n: t.numpy() for n, t in plain.named_tensors()}
    after = {n: t.numpy() for n, t in corrected.named_tensors()}
    assert before.keys() == after.keys()
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)


def test_other_algorithms_leave_what_is_shared() -> None:
    corrected = _prepared(_pyramid(), "output_cosine", "bn_reestimate")
    for report in read_record(corrected).ptq:
        assert sum("is shared with another call" in line for line in left_lines(report)) == 9


def test_a_bias_fits_into_the_smallest_accumulator() -> None:
    prepared = _prepared(_pyramid())
    layer = next(n for n in quantized_layers(prepared, shared=True)[0] if n.weight == "conv2.weight")
    scales = _steps(layer)
    assert len({float(scale[0]) for scale in scales}) == 3
    move_bias(prepared, layer, np.full(6, 1e12))
    np.testing.assert_allclose(
        prepared.conv2.bias.numpy().reshape(-1), BIAS_LIMIT * np.min(scales, axis=0), rtol=1e-5
    )


def test_corrected_heads_convert_to_what_was_prepared() -> None:
    prepared = _prepared(_pyramid(bias=False), REFIT)
    quantized, x = qtrace.convert(prepared), mge.Tensor(OTHERS[0])
    for expected, actual in zip(prepared(x), quantized(x), strict=True):
        np.testing.assert_array_equal(actual.numpy(), expected.numpy())

"""ONNX's recurrent layers as layers of the graph: equal values, gradients, the same node when exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import megengine as mge
import numpy as np
import onnx
import pytest
from megengine.autodiff import GradManager
from onnx import ModelProto

import qtrace
from qtrace.graph.opaque import opaque_calls
from tests.importing.onnx.opaque_net import Net
from tests.importing.onnx.test_opaque import assert_equal, batch, run_file, run_graph, save

_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


def _model(
    op: str, states: bool = False, bias: bool = True, lengths: Any = None, **attributes: Any
) -> ModelProto:
    net, size, gates = Net(), 6, _GATES[op]
    ways = 2 if attributes.get("direction") == "bidirectional" else 1
    shapes = [(ways, gates * size, 32), (ways, gates * size, size), (ways, 2 * gates * size)]
    inputs = [net.steps(net.features), *(net.weights(*shape) for shape in shapes[: 2 + bias])]
    if states or lengths is not None:
        inputs += [*([] if bias else [""]), "" if lengths is None else net.constant(lengths, np.int32)]
    if states:
        inputs += [net.weights(ways, 2, size) for _ in range(2 if op == "LSTM" else 1)]
    results = net.add(op, inputs, 3 if op == "LSTM" else 2, hidden_size=size, **attributes)
    return net.model(results[0], results[-1])


FORMS: dict[str, dict[str, Any]] = {
    "lstm": {"op": "LSTM"},
    "lstm_both": {"op": "LSTM", "direction": "bidirectional", "states": True},
    "lstm_reverse": {"op": "LSTM", "direction": "reverse", "bias": False, "states": True},
    "lstm_full": {"op": "LSTM", "lengths": [8, 8]},
    "gru": {"op": "GRU", "direction": "bidirectional"},
    "gru_torch": {"op": "GRU", "linear_before_reset": 1, "states": True},
    "gru_reverse": {"op": "GRU", "direction": "reverse", "bias": False},
    "rnn": {"op": "RNN", "direction": "bidirectional", "states": True},
    "rnn_relu": {"op": "RNN", "activations": ["Relu"]},
}


@pytest.mark.parametrize("name", FORMS)
def test_recurrent_node_becomes_a_layer_and_the_same_node_again(name: str, tmp_path: Path) -> None:
    path = save(_model(**FORMS[name]), tmp_path / "net.onnx")
    net = qtrace.from_onnx(path)
    assert not opaque_calls(net)
    out = Path(qtrace.export(net, tmp_path / "out.onnx"))
    for seed in (0, 1):
        expected = run_file(path, batch(seed))
        assert_equal(run_graph(net, batch(seed)), expected)
        assert_equal(run_file(out, batch(seed)), expected)
    own, written = (next(n for n in onnx.load(p).graph.node if n.op_type in _GATES) for p in (path, out))
    assert (written.name, list(written.input[:3])) == (own.name, list(own.input[:3]))
    kept = {a.name: a for a in own.attribute}
    assert kept == {a.name: a for a in written.attribute}
    qtrace.save(net, tmp_path / "net.mge")
    assert_equal(run_graph(qtrace.load(tmp_path / "net.mge"), batch(1)), expected)


@pytest.mark.parametrize(
    "form",
    [
        {"op": "LSTM", "clip": 2.0},
        {"op": "LSTM", "lengths": [8, 5]},
        {"op": "LSTM", "input_forget": 1},
        {"op": "GRU", "activations": ["HardSigmoid", "Tanh"]},
        {"op": "RNN", "activations": ["Softsign"]},
    ],
    ids=str,
)
def test_another_form_stays_as_in_the_file(form: dict[str, Any], tmp_path: Path) -> None:
    path = save(_model(**form), tmp_path / "net.onnx")
    net = qtrace.from_onnx(path)
    assert opaque_calls(net)
    assert_equal(run_graph(net, batch(0)), run_file(path, batch(0)))


@pytest.mark.parametrize("name", ["lstm_both", "gru_torch", "rnn"])
def test_a_gradient_passes_through_it_while_quantized(name: str, tmp_path: Path) -> None:
    net = qtrace.from_onnx(save(_model(**FORMS[name]), tmp_path / "net.onnx"))
    prepared = qtrace.prepare(net, {"ptq": [], "placement": "everything"})
    qtrace.calibrate(prepared, [{"x": batch(0)}], progress=False)
    level, mge.config.async_level = mge.config.async_level, 0
    try:
        qtrace.set_phase(prepared, "train")
        parameters = dict(prepared.named_parameters())
        manager = GradManager().attach(list(parameters.values()))
        with manager:
            manager.backward(sum((y**2).sum() for y in prepared(mge.Tensor(batch(1)))))
    finally:
        mge.config.async_level = level
    learned = {key.rpartition(".")[2] for key, p in parameters.items() if p.grad is not None}
    assert {"weight", "recurrence", "bias"} <= learned
    assert all(np.isfinite(p.grad.numpy()).all() for p in parameters.values() if p.grad is not None)


@pytest.mark.parametrize("op", _GATES)
def test_layers_of_other_settings_share_their_weights(op: str, tmp_path: Path) -> None:
    net, rows = Net(), _GATES[op] * 6
    weights = [net.weights(1, rows, 32), net.weights(1, rows, 6)]
    bias = net.weights(1, 2 * rows)
    steps, results = net.steps(net.features), []
    for direction, more in (("forward", []), ("reverse", []), ("reverse", [bias])):
        inputs, count = [steps, *weights, *more], 3 if op == "LSTM" else 2
        results.append(net.add(op, inputs, count, hidden_size=6, direction=direction)[0])
    path = save(net.model(*results), tmp_path / "net.onnx")
    traced = qtrace.from_onnx(path)
    assert_equal(run_graph(traced, batch(1)), run_file(path, batch(1)))
    shapes = sorted(tuple(p.shape) for _, p in traced.named_parameters() if p.ndim == 3)
    assert shapes == sorted([(1, rows, 32), (1, rows, 6)])
    qtrace.save(traced, tmp_path / "net.mge")
    assert_equal(run_graph(qtrace.load(tmp_path / "net.mge"), batch(1)), run_file(path, batch(1)))
    prepared = qtrace.prepare(traced, {"ptq": [], "placement": "everything"})
    qtrace.calibrate(prepared, [{"x": batch(0)}], progress=False)
    out = Path(qtrace.export(qtrace.convert(prepared), tmp_path / "out.onnx"))
    written = [n for n in onnx.load(out).graph.node if n.op_type == op]
    assert len({tuple(n.input[1:3]) for n in written}) == 1


def test_the_last_cell_state_alone_is_a_result(tmp_path: Path) -> None:
    model = _model("LSTM")
    node = next(n for n in model.graph.node if n.op_type == "LSTM")
    del model.graph.output[0]
    node.output[0] = node.output[1] = ""
    path = save(model, tmp_path / "net.onnx")
    traced = qtrace.from_onnx(path)
    assert not opaque_calls(traced)
    assert_equal(run_graph(traced, batch(0)), run_file(path, batch(0)))

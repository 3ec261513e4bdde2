"""Networks of torch: names, values, open axes, the state that comes back, and what is refused."""

from __future__ import annotations

import inspect
from pathlib import Path

import numpy as np
import pytest
from megengine import Tensor

import qtrace
from qtrace.errors import ImportingError
from qtrace.graph.opaque import opaque_calls
from qtrace.graph.open_axes import read_open_axes

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from tests.extras.torch import nets  # noqa: E402

X = np.random.default_rng(0).standard_normal((4, 3, 8, 8)).astype(np.float32)
TOKENS = np.random.default_rng(1).standard_normal((3, 6, 16)).astype(np.float32)
GAIN = np.full((3, 1, 1), 2, np.float32)


@pytest.fixture(scope="module")
def block() -> tuple[torch.nn.Module, object]:
    module = nets.Block()
    module.train()
    return module, qtrace.from_torch(module, torch.from_numpy(X[:1]))


def _expected(module: torch.nn.Module, *inputs: np.ndarray) -> np.ndarray:
    module.eval()
    with torch.no_grad():
        return module(*map(torch.from_numpy, inputs)).numpy()


def test_the_graph_computes_what_torch_does_at_every_batch(block: tuple) -> None:
    module, traced = block
    assert module.training  # as it was
    assert module.stem[1].training
    for size in (1, 3, 4):
        np.testing.assert_allclose(traced(Tensor(X[:size])).numpy(), _expected(module, X[:size]), atol=1e-5)
    module.train()


def test_names_are_those_of_the_state(block: tuple) -> None:
    module, traced = block
    own = {name for name, _ in module.named_parameters()}
    assert set(dict(traced.named_parameters())) == own
    names = {expr.outputs[0].name for expr in traced.graph._exprs if expr.outputs}
    assert {"stem_0_1", "add", "mean", "fc_1"} <= {
        name.replace("stem_0_conv2d", "stem_0_1") for name in names
    }


@pytest.mark.parametrize(
    ("layer", "options"),
    [("LSTM", {"num_layers": 2, "bidirectional": True}), ("GRU", {"bias": False}), ("RNN", {})],
)
def test_weights_of_recurrent_layers_come_back(layer: str, options: dict) -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = getattr(torch.nn, layer)(5, 4, batch_first=True, **options)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.rnn(x)[0]

    module, x = Net().eval(), torch.randn(2, 3, 5)
    traced = qtrace.from_torch(module, (x,))
    state = qtrace.to_torch_state(traced)
    for name, value in module.state_dict().items():
        assert torch.equal(state[name], value), name
    prepared = qtrace.prepare(traced)
    for parameter in prepared.parameters():  # as if trained
        parameter[...] = parameter * 1.25
    module.load_state_dict(qtrace.to_torch_state(prepared))
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, 1.25 * state[name], msg=name)


def test_the_state_of_an_import_is_that_of_the_module(block: tuple) -> None:
    module, traced = block
    state, own = qtrace.to_torch_state(traced), module.state_dict()
    assert set(state) == {name for name in own if not name.endswith("num_batches_tracked")}
    assert all(torch.equal(tensor, own[name]) for name, tensor in state.items())


@pytest.mark.parametrize("bias", [False, True])
def test_a_converted_network_gives_its_weights_back(bias: bool, tmp_path: Path) -> None:
    module = nets.Block(bias)
    prepared = qtrace.prepare(qtrace.from_torch(module, X[:2]), "backend/onnxruntime")
    qtrace.calibrate(prepared, [X], progress=False)
    weight = prepared.fc.weight
    weight._reset(type(weight)(weight.numpy() * 3))  # what a training loop might do
    qtrace.save(qtrace.convert(prepared), tmp_path / "net.mge")
    restored = nets.Block(bias)
    problems = restored.load_state_dict(
        qtrace.to_torch_state(qtrace.load(tmp_path / "net.mge")), strict=False
    )
    assert not problems.unexpected_keys
    with torch.no_grad():
        module.fc.weight.mul_(3)
    np.testing.assert_allclose(_expected(restored, X), _expected(module, X), atol=1e-5)


def test_parts_of_one_weight_and_inputs_by_name() -> None:
    module = nets.Encoder()
    traced = qtrace.from_torch(module, {"tokens": TOKENS, "gain": GAIN}, dynamic={})
    result = traced(Tensor(TOKENS), Tensor(GAIN)).numpy()
    np.testing.assert_allclose(result, _expected(module, TOKENS, GAIN), atol=1e-5)
    state = qtrace.to_torch_state(traced)
    assert set(state) == set(module.state_dict())
    assert all(torch.equal(tensor, module.state_dict()[name]) for name, tensor in state.items())


def test_open_axes_by_name() -> None:
    traced = qtrace.from_torch(nets.Block(), X, dynamic={"x": {0: "N", -1: "W"}})
    record = read_open_axes(traced)
    assert record is not None
    assert {(axis.axis, axis.name) for axis in record.axes} == {(0, "N"), (3, "W")}
    wide = np.concatenate([X, X], 3)[:3]
    np.testing.assert_allclose(traced(Tensor(wide)).numpy(), _expected(nets.Block(), wide), atol=1e-5)


def test_a_program_of_torch_export_and_its_file(tmp_path: Path) -> None:
    module = nets.Block().eval()
    batch = {"x": {0: torch.export.Dim("N")}}
    program = torch.export.export(module, (torch.from_numpy(X),), dynamic_shapes=batch)
    torch.export.save(program, tmp_path / "net.pt2")
    for source in (program, tmp_path / "net.pt2"):
        traced = qtrace.from_torch(source)
        for size in (4, 3):
            np.testing.assert_allclose(
                traced(Tensor(X[:size])).numpy(), _expected(module, X[:size]), atol=1e-5
            )
        assert "stem.0.weight" in qtrace.to_torch_state(traced)


def test_refusals_name_the_line_of_the_source() -> None:
    lines, first = inspect.getsourcelines(nets.Branching)
    branch = first + next(i for i, line in enumerate(lines) if "x.max()" in line)
    with pytest.raises(ImportingError, match=rf"cannot export Branching \(at .*nets\.py:{branch}\)"):
        qtrace.from_torch(nets.Branching(), X)
    assert opaque_calls(qtrace.from_torch(nets.Sorted(), X, dynamic={}))  # NonZero is kept as in the file


def test_an_op_that_torchs_exporter_lacks_is_named_with_its_line() -> None:
    lines, first = inspect.getsourcelines(nets.Decomposing)
    place = first + next(i for i, line in enumerate(lines) if "linalg.qr" in line)
    with pytest.raises(
        ImportingError, match=rf"Decomposing \(at .*nets\.py:{place}\).* lacks .* form of aten\.linalg_qr\."
    ) as refusal:
        qtrace.from_torch(nets.Decomposing(), X)
    assert "values of the data" not in str(refusal.value)


def test_what_is_no_network_of_torch(tmp_path: Path) -> None:
    (tmp_path / "net.pt").write_bytes(b"PK")
    (tmp_path / "net.pt2").write_bytes(b"PK")
    cases = [
        (torch.jit.trace(torch.relu, torch.zeros(1)), X, {}, "is a function of TorchScript"),
        (7, X, {}, "of type int"),
        (nets.Block(), None, {}, "needs an example"),
        (nets.Block(), (X, X), {}, "does not fit Block.forward"),
        (nets.Block(), X, {"dynamic": {"y": {0: "N"}}}, "'y' is no input"),
        (nets.Block(), X, {"dynamic": {"x": {4: "N"}}}, "no axis 4"),
        (nets.Block(), X, {"dynamic": {"x": {0: ""}}}, "needs a name"),
        (tmp_path / "net.pt", None, {}, "nor TorchScript"),
        (tmp_path / "net.pt2", None, {}, "cannot be loaded"),
        (tmp_path / "none.pt2", None, {}, "is not a file"),
    ]
    for source, example, options, words in cases:
        with pytest.raises(ImportingError, match=words):
            qtrace.from_torch(source, example, **options)


@pytest.mark.parametrize("kind", ["traced", "scripted", "file", "frozen"])
def test_torchscript_comes_in_under_the_names_of_its_state(kind: str, tmp_path: Path) -> None:
    module = nets.Block().eval()
    script = torch.jit.script(module) if kind == "scripted" else torch.jit.trace(module, torch.from_numpy(X))
    source = torch.jit.freeze(script) if kind == "frozen" else script
    if kind == "file":
        script.save(str(tmp_path / "net.pt"))
        source = tmp_path / "net.pt"
    traced = qtrace.from_torch(source, {"x": X[:1]} if kind == "scripted" else X[:1])
    for size in (1, 3, 4):
        np.testing.assert_allclose(traced(Tensor(X[:size])).numpy(), _expected(module, X[:size]), atol=1e-5)
    if kind == "frozen":
        return  # its weights are constants without names
    state, own = qtrace.to_torch_state(traced), module.state_dict()
    assert set(state) == {name for name in own if not name.endswith("num_batches_tracked")}
    assert all(torch.equal(tensor, own[name]) for name, tensor in state.items())
    assert set(dict(traced.named_parameters())) == {name for name, _ in module.named_parameters()}


def test_a_detector_that_the_newer_exporter_refuses_comes_in_as_a_trace(tmp_path: Path) -> None:
    module, image = nets.Detector().eval(), X[:1]
    with pytest.raises(ImportingError, match=r"cannot export Detector.* give torch\.jit\.trace\(module"):
        qtrace.from_torch(module, image, dynamic={})
    script = torch.jit.trace(module, torch.from_numpy(image))
    traced = qtrace.from_torch(script, image, dynamic={})
    assert opaque_calls(traced)
    for batch in (image, X[1:2]):
        with torch.no_grad():
            expected = module(torch.from_numpy(batch))
        assert len(expected[0]) > 1
        for got, want in zip(traced(Tensor(batch)), expected, strict=True):
            np.testing.assert_allclose(got.numpy(), want.numpy(), atol=1e-5)
    prepared = qtrace.prepare(traced, "backend/onnxruntime")
    qtrace.calibrate(prepared, [image], progress=False)
    converted = qtrace.convert(prepared)
    qtrace.export(converted, tmp_path / "net.onnx")
    assert qtrace.verify(tmp_path / "net.onnx", converted, [image]).passed


def test_a_trace_that_holds_its_batch_has_it_fixed(caplog: pytest.LogCaptureFixture) -> None:
    class Held(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.reshape(4, 3, 64) * 2

    traced = qtrace.from_torch(torch.jit.trace(Held(), torch.from_numpy(X)), X)
    np.testing.assert_array_equal(traced(Tensor(X)).numpy(), X.reshape(4, 3, 64) * 2)
    assert "the batch is fixed" in caplog.text


@pytest.mark.parametrize("kind", ["module", "program", "script"])
def test_tied_weights_stay_one_and_come_back_under_both_names(kind: str) -> None:
    module, ids = nets.Tied().eval(), torch.arange(10).reshape(2, 5) % 11
    source = {
        "module": lambda: module,
        "program": lambda: torch.export.export(module, (ids,)),
        "script": lambda: torch.jit.trace(module, ids),
    }[kind]()
    traced = qtrace.from_torch(source, None if kind == "program" else ids)
    assert sum(parameter.shape == (11, 8) for parameter in traced.parameters()) == 1
    prepared = qtrace.prepare(traced)
    qtrace.calibrate(prepared, [ids.numpy()], progress=False)
    for net in (traced, prepared, qtrace.convert(prepared)):
        state = qtrace.to_torch_state(net)
        assert set(state) == set(module.state_dict())
        assert torch.equal(state["words.weight"], state["out.weight"])
    for parameter in traced.parameters():
        parameter[...] = parameter * 2.0  # what training might do
    tuned = nets.Tied()
    tuned.load_state_dict(qtrace.to_torch_state(traced))
    assert tuned.out.weight is tuned.words.weight
    result = traced(Tensor(ids.numpy())).numpy()
    np.testing.assert_allclose(tuned(ids).detach().numpy(), result, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kept", [False, True])
def test_tables_read_at_places_come_back_and_what_does_not_is_named(
    kept: bool, caplog: pytest.LogCaptureFixture
) -> None:
    module, images = nets.Tables().eval(), np.repeat(X, 3, 1)[:, :8]
    if kept:
        module.keep()
    traced = qtrace.from_torch(module, images)
    np.testing.assert_allclose(traced(Tensor(images)).numpy(), _expected(module, images), atol=1e-5)
    prepared = qtrace.prepare(traced, "backend/onnxruntime")
    qtrace.calibrate(prepared, [images], progress=False)
    own = module.state_dict()
    trained = {"norm.weight", "norm.bias", "shift"} | (set() if kept else {"biases"})
    assert trained <= dict(traced.named_parameters()).keys()  # no constants
    for net in (traced, prepared, qtrace.convert(prepared)):
        caplog.clear()
        state = qtrace.to_torch_state(net)
        assert set(own) - set(state) == {"gain", "last.weight"}  # the module computes a weight from both
        assert "the state lacks gain, last.weight" in caplog.text
        assert all(torch.equal(tensor, own[name]) for name, tensor in state.items())
    stored = {**dict(traced.named_parameters()), **dict(traced.named_buffers())}
    table = next(p for name, p in stored.items() if p.numpy().size == 8 * 64 and name != "shift")
    table[...] = table + np.arange(8 * 64, dtype=np.float32).reshape(table.shape)
    with pytest.raises(ImportingError, match="holds numbers of biases several times, and they differ"):
        qtrace.to_torch_state(traced)


def test_quantize_takes_a_module_of_torch(tmp_path: Path) -> None:
    result = qtrace.quantize(nets.Block(), [X, X], tmp_path / "net.onnx", recipe="backend/onnxruntime")
    assert result.path.exists()
    assert result.verify is not None
    assert result.verify.passed

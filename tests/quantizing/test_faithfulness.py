"""The float graph beside the network that the user gave: another network is an error, rounding is none."""

from __future__ import annotations

import logging
import resource
from pathlib import Path

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import onnxruntime
import pytest
from megengine.quantization import ema_fakequant_qconfig, quantize_qat
from megengine.traced_module import trace_module
from onnxruntime.quantization import quantize_dynamic

import qtrace
from qtrace.data import open_data
from qtrace.errors import CalibrationError, ExportError, GraphError
from qtrace.graph.flatten import set_parameter
from qtrace.preparation import faithfulness
from qtrace.preparation import prepare as preparing
from qtrace.preparation.faithfulness import Faithfulness, run_graph
from qtrace.ptq.base import FloatAlgorithm
from qtrace.quantizing import calibrator, quantize
from qtrace.quantizing.sources import open_original
from tests.importing.onnx.networks import model, node, save, weights
from tests.nets import images, net

DATA = images(16, 3, 8, 8)


def _forward(self, x):
    return self.b(F.relu(self.bn(self.a(x))))


def _module(forward=_forward, **attributes) -> M.Module:
    mge.random.seed(1)
    layers = {"a": M.Conv2d(3, 8, 3), "bn": M.BatchNorm2d(8), "b": M.Conv2d(8, 4, 1)}
    return net(forward, **layers, **attributes)


def _change_weight(traced, name: str = "b.weight"):
    """Scales one output channel of a layer."""
    value = dict(traced.named_parameters())[name].numpy().copy()
    value[..., 1, :, :, :] *= 1.5
    set_parameter(traced, name, mge.Parameter(value))
    return traced


def _prepared(traced):
    return qtrace.prepare(traced, {"ptq": ["fuse_bn"]})


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def onnx_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("onnx") / "net.onnx"
    qtrace.export(qtrace.trace(_module(), DATA[:2], check=False), path)
    return path


@pytest.mark.parametrize("source", ["module", "file"])
def test_a_graph_that_computes_something_else_is_refused_before_it_is_calibrated(
    source: str, here: Path, onnx_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = quantize.read_network
    monkeypatch.setattr(quantize, "read_network", lambda *given: _change_weight(read(*given)))
    monkeypatch.setattr(calibrator, "calibrate", None)
    given = _module() if source == "module" else onnx_file
    name = "Net" if source == "module" else "net.onnx"
    with pytest.raises(
        GraphError, match=rf"does not compute what .*{name} computes: .* differs by 0\.\d+ of its"
    ):
        qtrace.quantize(given, DATA, "out.onnx", progress=False)
    assert not list(here.iterdir())


@pytest.mark.quick(2)
@pytest.mark.parametrize("source", ["module", "file", "trace", "saved"])
def test_a_prepared_graph_that_computes_something_else_in_float_is_refused(
    source: str, here: Path, onnx_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = calibrator.prepare_config
    monkeypatch.setattr(calibrator, "prepare_config", lambda *given: _change_weight(make(*given)))
    monkeypatch.setattr(calibrator, "calibrate", None)
    traced = qtrace.trace(_module(), DATA[:2], check=False)
    qtrace.save(traced, "net.mge")
    given = {"module": _module(), "file": onnx_file, "trace": traced, "saved": "net.mge"}[source]
    with pytest.raises(GraphError, match=r"prepare changed what the network computes in float: .*fuse_bn"):
        qtrace.quantize(given, DATA, "out.onnx", progress=False)


def test_a_folder_is_made_of_no_graph_that_prepare_changed(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = preparing.prepare_config
    monkeypatch.setattr(preparing, "prepare_config", lambda *given: _change_weight(make(*given)))
    with pytest.raises(GraphError, match="prepare changed what the network computes in float"):
        qtrace.calibrate_to_folder(
            qtrace.trace(_module(), DATA[:2], check=False), DATA, "folder", progress=False
        )
    assert not Path("folder").exists()


class Shrink(FloatAlgorithm):
    """Changes a weight, as an algorithm of the user's own may."""

    def apply(self, task):
        _change_weight(task.model)
        from qtrace.ptq.base import Report

        return Report()


def test_an_algorithm_of_the_users_own_may_change_values(here: Path) -> None:
    recipe = {"ptq": [f"{__name__}:Shrink"]}
    qtrace.quantize(_module(), DATA, "out.onnx", recipe=recipe, verify=False, measure=False, progress=False)
    assert Path("out.onnx").is_file()


def _keep_peak(self, x):
    self.peak = F.maximum(self.peak, x.max())
    return self.b(self.a(x / self.peak))


def _reset_peak(self, x):
    self.peak._reset(F.maximum(self.peak, x.max()))
    return self.b(self.a(x / self.peak))


def _count(self, x):
    self.calls = self.__dict__.get("calls", 0) + 1
    return self.b(self.a(x)) * (1 if self.calls < 2 else 0.5)


def _cache(self, x):
    if "seen" not in self.__dict__:
        self.seen = x.mean()
    return self.b(self.a(x - self.seen))


@pytest.mark.parametrize("forward", [_keep_peak, _reset_peak, _count, _cache])
@pytest.mark.parametrize("order", [1, -1])
def test_a_module_whose_calls_change_the_next_ones_is_refused(forward, order: int) -> None:
    module = _module(forward, peak=mge.Tensor(np.ones(1, np.float32)))
    data = DATA[:2] * np.float32([3, 9])[::order].reshape(2, 1, 1, 1)

    def first_call(self, x):
        if forward is _count:
            return self.b(self.a(x))
        if forward is _cache:
            return self.b(self.a(x - x.mean()))
        return self.b(self.a(x / F.maximum(self.peak, x.max())))

    traced = qtrace.trace(_module(first_call, peak=module.peak), data, check=False)
    before = module.peak.numpy()
    with pytest.raises(
        GraphError, match=r"a call of Net changes the results of the next ones, as it keeps a state"
    ):
        Faithfulness(open_original(module, traced), traced, open_data(data)).check(_prepared(traced))
    np.testing.assert_array_equal(module.peak.numpy(), before)
    assert not {"calls", "seen"} & vars(module).keys()


def test_a_network_of_random_numbers_is_not_compared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = [
        node("Conv", "x w", "c", kernel_shape=[1, 1]),
        node("RandomNormalLike", "c", "r"),
        node("Add", "c r", "y"),
    ]
    path = save(model(nodes, {"x": (1, 3, 4, 4)}, ["y"], {"w": weights(2, 3, 1, 1)}), tmp_path)
    data = open_data(images(4, 3, 4, 4), batch_size=1)
    with caplog.at_level(logging.INFO, logger="qtrace"):
        traced = qtrace.from_onnx(path)
        compared = Faithfulness(open_original(path, traced), traced, data)
        compared.check(_prepared(traced))
    assert "draws random numbers" in caplog.text


def test_outputs_of_a_file_hold_none_of_the_memory_of_its_session(tmp_path: Path) -> None:
    path = save(model([node("Relu", "x", "y")], {"x": (1, 3, 4, 4)}, ["y"], {}), tmp_path)
    original = open_original(path, qtrace.from_onnx(path))
    assert original is not None
    assert [value.flags.owndata for value in original.start()((images(1, 3, 4, 4),))] == [True]


@pytest.mark.quick(1)
@pytest.mark.parametrize("source", ["file", "graph"])
@pytest.mark.parametrize(
    ("size", "given", "option", "error", "cure"),
    [
        (0.03, {}, "verify", ExportError, "so the file cannot be verified: .* or give verify=False"),
        (1.0, {"verify": False}, "allow_broken", CalibrationError, "count as noise .* allow_broken=."),
    ],
)
def test_random_numbers_are_named_where_they_are_all_that_differs(
    tmp_path: Path,
    source: str,
    size: float,
    given: dict[str, bool],
    option: str,
    error: type[Exception],
    cure: str,
) -> None:
    """The runtime was said to compute something else, and the graph to be useless."""
    nodes = [
        node("Conv", "x w", "c", kernel_shape=[1, 1]),
        node("RandomNormalLike", "c", "noise", scale=size),
        node("Add", "c noise", "y"),
    ]
    path = save(model(nodes, {"x": (1, 3, 8, 8)}, ["y"], {"w": weights(2, 3, 1, 1)}), tmp_path)
    network = path if source == "file" else qtrace.from_onnx(path)
    out, recipe = tmp_path / "net-int8.onnx", {"placement": "everything"}
    with pytest.raises(error, match=rf"as noise draws random numbers, .*{cure}"):
        qtrace.quantize(network, DATA, out, recipe=recipe, **given)
    assert not out.exists()
    cured = {**given, option: option == "allow_broken"}
    assert qtrace.quantize(network, DATA, out, recipe=recipe, **cured).path == out


@pytest.mark.parametrize("source", ["module", "trace"])
def test_fake_quants_of_megengine_are_no_part_of_the_float_network(source: str) -> None:
    module = net(
        lambda self, x: self.dequant(self.b(self.a(self.quant(x)))),
        quant=M.QuantStub(),
        a=M.ConvBnRelu2d(3, 8, 3),
        b=M.Conv2d(8, 4, 1),
        dequant=M.DequantStub(),
    )
    trained = quantize_qat(module, qconfig=ema_fakequant_qconfig)
    trained.train()
    trained(mge.Tensor(DATA))
    trained.eval()
    plain = qtrace.trace(trained, DATA[:2], check=False)
    batch = (DATA[:1],)
    result = trained(mge.Tensor(DATA[:1])).numpy()
    assert np.abs(result - run_graph(plain, batch)[0]).max() > 2e-3 * np.abs(result).max()
    if source == "trace":
        trained = trace_module(trained, mge.Tensor(DATA[:2]))
    Faithfulness(open_original(trained, plain), plain, open_data(DATA)).check(_prepared(plain))


def test_rounding_that_the_network_enlarges_is_no_difference() -> None:
    def steep(self, x):
        return F.sin(self.bn(self.a(x)) * 3e5)

    module = _module(steep)
    data = open_data(DATA)
    traced = qtrace.trace(module, DATA[:2], check=False)
    prepared = qtrace.prepare(traced, {"ptq": ["fuse_bn"]})
    batch = (DATA[:1],)
    expected, outputs = run_graph(traced, batch)[0], run_graph(prepared, batch)[0]
    assert np.abs(expected - outputs).max() > 0.01
    compared = Faithfulness(open_original(module, traced), traced, data)
    compared.check(prepared)


@pytest.mark.parametrize("largest", [1.0, 1e-12])
def test_infinite_values_and_outputs_close_to_zero_are_compared_with_care(largest: float) -> None:
    def forward(self, x):
        y = self.b(self.a(x))
        return F.where(y > 0, y * largest, F.full_like(y, -np.inf))

    module = _module(forward)
    traced = qtrace.trace(module, DATA[:2], check=False)
    Faithfulness(open_original(module, traced), traced, open_data(DATA)).check(_prepared(traced))


@pytest.mark.parametrize("offset", [-12, -16, -20, -25, -40])
def test_sigmoids_of_files_that_are_close_to_zero_are_no_difference(
    offset: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = {"w": weights(4, 3, 3, 3), "b": np.full(4, offset, np.float32)}
    nodes = [node("Conv", "x w b", "c", kernel_shape=[3, 3]), node("Sigmoid", "c", "y")]
    path = save(model(nodes, {"x": (1, 3, 8, 8)}, ["y"], stored), tmp_path)
    traced = qtrace.from_onnx(path)
    data = open_data(DATA * np.float32(0.3), batch_size=1)
    compared = Faithfulness(open_original(path, traced), traced, data)
    monkeypatch.setattr(faithfulness, "_is_rounding", lambda *_: False)
    compared.check(_prepared(traced))


def test_places_of_equal_values_may_be_others(tmp_path: Path) -> None:
    """A detector that keeps the peaks of a map: behind them are zeros, among which runtimes pick any."""
    stored = {
        "w": weights(1, 3, 3, 3),
        "s": weights(2, 3, 3, 3, seed=1),
        "k": np.array([20]),
        "flat": np.array([0, -1]),
        "pairs": np.array([0, 2, -1]),
        "one": np.array([1]),
        "twice": np.array([1, 2, 1]),
    }
    nodes = [
        node("Conv", "x w", "heat"),
        node("MaxPool", "heat", "highest", kernel_shape=[3, 3], pads=[1] * 4),
        node("Equal", "highest heat", "is_peak"),
        node("Cast", "is_peak", "peak", to=1),
        node("Mul", "heat peak", "peaks"),
        node("Relu", "peaks", "scored"),
        node("Reshape", "scored flat", "row"),
        node("TopK", "row k", "scores places", axis=1),
        node("Conv", "x s", "sizes"),
        node("Reshape", "sizes pairs", "columns"),
        node("Unsqueeze", "places one", "place"),
        node("Tile", "place twice", "both"),
        node("GatherElements", "columns both", "boxes", axis=2),
    ]
    path = save(model(nodes, {"x": ["N", 3, 16, 16]}, ["scores", "boxes"], stored), tmp_path)
    traced = qtrace.from_onnx(path)
    data = open_data(images(4, 3, 16, 16))
    Faithfulness(open_original(path, traced), traced, data).check(_prepared(traced))
    with pytest.raises(GraphError):  # what is not behind these places is compared
        Faithfulness(open_original(path, traced), traced, data).check(_change_heat(_prepared(traced)))


def _change_heat(prepared):
    for name, value in list(prepared.named_parameters()):
        if value.shape == (1, 3, 3, 3):
            set_parameter(prepared, name, mge.Parameter(value.numpy() * 1.5))
    return prepared


def test_a_black_image_behind_norms_is_rounding(tmp_path: Path) -> None:
    """A norm of a constant map makes much of its roundings, and a share of 0 has no last bits."""
    stored, nodes, tensor = {}, [], "x"
    for index, channels in enumerate((3, 8, 8, 8, 8)):
        stored |= {
            f"w{index}": weights(8, channels, 3, 3, seed=index),
            f"b{index}": weights(8, seed=9 + index),
        }
        nodes += [
            node("Conv", f"{tensor} w{index} b{index}", f"c{index}"),
            node("InstanceNormalization", f"c{index} one zero", f"n{index}", epsilon=1e-5),
            node("Relu", f"n{index}", f"r{index}"),
        ]
        tensor = f"r{index}"
    stored |= {"one": np.ones(8, np.float32), "zero": np.zeros(8, np.float32)}
    path = save(model(nodes, {"x": ["N", 3, 48, 48]}, [tensor], stored), tmp_path)
    traced = qtrace.from_onnx(path)
    data = images(4, 3, 48, 48)
    data[:2] = 0.0
    Faithfulness(open_original(path, traced), traced, open_data(data)).check(_prepared(traced))


def test_one_number_in_half_precision_hides_no_other_network(tmp_path: Path) -> None:
    stored = {"w": weights(8, 3, 3, 3), "half": np.array(1, np.float16)}
    nodes = [node("Conv", "x w", "c"), node("Cast", "half", "h", to=1), node("Mul", "c h", "y")]
    path = save(model(nodes, {"x": ["N", 3, 8, 8]}, ["y"], stored), tmp_path)
    traced = qtrace.from_onnx(path)
    Faithfulness(open_original(path, traced), traced, open_data(DATA)).check(_prepared(traced))
    for name, value in list(traced.named_parameters()):
        set_parameter(traced, name, mge.Parameter(value.numpy() * 3.0))
    with pytest.raises(GraphError, match="does not compute"):
        Faithfulness(open_original(path, traced), traced, open_data(DATA)).check(_prepared(traced))


def test_a_file_in_half_precision_is_compared_with_its_own_precision(tmp_path: Path) -> None:
    stored = {"w": weights(4, 3, 3, 3).astype(np.float16), "v": weights(4, 4, 3, 3).astype(np.float16)}
    nodes = [
        node("Cast", "x", "h", to=10),
        node("Conv", "h w", "c", kernel_shape=[3, 3]),
        node("Conv", "c v", "d", kernel_shape=[3, 3]),
        node("Cast", "d", "y", to=1),
    ]
    path = save(model(nodes, {"x": (1, 3, 8, 8)}, ["y"], stored), tmp_path)
    traced, data = qtrace.from_onnx(path), open_data(DATA, batch_size=1)
    assert open_original(path, traced).precision == 2.0**-10
    Faithfulness(open_original(path, traced), traced, data).check(_prepared(traced))


def test_a_module_that_fails_on_one_sample_is_compared_on_a_batch() -> None:
    def forward(self, x):
        if int(x.shape[0]) == 1:
            raise ValueError("it needs two samples")
        return self.b(self.a(x))

    module = _module(forward)
    traced = qtrace.trace(_module(lambda self, x: self.b(self.a(x))), DATA[:2], check=False)
    compared = Faithfulness(open_original(module, traced), traced, open_data(DATA, batch_size=4))
    compared.check(_prepared(traced))
    with pytest.raises(GraphError, match="does not compute what Net computes"):
        compared.check(_prepared(_change_weight(traced)))


def _resident() -> int:
    """Returns the bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_a_module_with_results_that_the_graph_has_not_is_not_compared() -> None:
    traced = qtrace.trace(_module(), DATA[:2], check=False)
    module = _module(lambda self, x: (self.a(x), self.b(self.a(x))))
    Faithfulness(open_original(module, traced), traced, open_data(DATA)).check(_prepared(traced))


def test_the_copies_of_a_module_share_its_weights() -> None:
    values = np.ones((4096, 4096), np.float32)
    module = net(lambda self, x: F.matmul(x, self.w), w=mge.Parameter(values))
    traced = qtrace.trace(module, np.ones((2, 4096), np.float32), check=False)
    before = _resident()
    runs = [open_original(module, traced).start() for _ in range(4)]
    results = [run((np.ones((1, 4096), np.float32),))[0] for run in runs]
    assert all((result == 4096).all() for result in results)
    assert _resident() - before < values.nbytes


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("op", "gates", "recipe", "least"),
    [
        ("LSTM", 32, None, 28),
        ("LSTM", 32, {"rules": [{"match": {"op": "linear"}, "method": "dynamic"}]}, 28),
        ("GRU", 24, None, 24),
    ],
)
def test_files_that_round_by_the_range_of_each_batch_are_quantized(
    op: str, gates: int, recipe, least: float, here: Path
) -> None:
    nodes = [
        node("Conv", "x c cb", "u", pads=[1, 1]),
        node("Transpose", "u", "t", perm=[2, 0, 1]),
        node(op, "t l r", "_ h", hidden_size=8),
        node("Squeeze", "h first", "s"),
        node("MatMul", "s m", "y"),
    ]
    stored = {"c": weights(6, 4, 3), "cb": weights(6), "l": weights(1, gates, 6), "r": weights(1, gates, 8)}
    stored |= {"first": np.zeros(1, np.int64), "m": weights(8, 5)}
    source = save(model(nodes, {"x": ["n", 4, 10]}, stored=stored), here)
    quantize_dynamic(source, "dynamic.onnx")
    data = images(32, 4, 10)
    qtrace.quantize("dynamic.onnx", data, "q.onnx", recipe=recipe, progress=False, measure=False)
    outputs = [
        onnxruntime.InferenceSession(file).run(None, {"x": data[:8]})[0] for file in (source, "q.onnx")
    ]
    assert 10 * np.log10((outputs[0] ** 2).sum() / ((outputs[1] - outputs[0]) ** 2).sum()) > least

"""The TFLite file: layouts, types, scales, names, a free batch; refusals before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter

import qtrace
from qtrace import QConfig
from qtrace.errors import ExportError
from qtrace.graph.types import TracedModule
from tests.each import each_of
from tests.nets import ResNet, images, net, randomize
from tests.targets.tflite.files import constants, facts, kinds, load, tensors

X = [images(3, 4, 8, 8, seed=s) for s in range(2)]


def _forward(self: Any, x: mge.Tensor) -> mge.Tensor:
    y = F.relu6(self.depth(F.relu(self.conv(x))))
    return self.fc(F.flatten(y, 1))


def _net() -> M.Module:
    return net(
        _forward,
        conv=M.Conv2d(4, 6, (3, 5), padding=(1, 2)),
        depth=M.Conv2d(6, 6, 3, padding=1, groups=6, bias=False),
        fc=M.Linear(384, 7),
    )


def _converted(module: M.Module, **config: Any) -> TracedModule:
    traced = qtrace.trace(module, X[0], check=False)
    prepared = qtrace.prepare(traced, QConfig(**{"backend": "tflite", **config}))
    return qtrace.convert(qtrace.calibrate(prepared, X, progress=False))


@pytest.fixture(scope="module")
def model() -> TracedModule:
    return _converted(_net())


@pytest.fixture
def path(model: TracedModule, tmp_path: Path) -> Path:
    return qtrace.export(model, tmp_path / "m.tflite")


def test_weights_stand_as_the_kernels_read_them(path: Path) -> None:
    stored, described = constants(path), tensors(path)
    assert stored["conv_weight_int"].shape == (6, 3, 5, 4)  # out, height, width, in
    assert stored["depth_weight_int"].shape == (1, 3, 3, 6)  # 1, height, width, channels
    for name, axis in (("conv", 0), ("depth", 3)):
        tensor = described[f"{name}_weight_int"]
        assert tensor.type == schema.TensorType.INT8
        assert tensor.quantization.quantizedDimension == axis
        assert tensor.quantization.scale.shape == (6,)
        assert not tensor.quantization.zeroPoint.any()
        assert np.abs(stored[f"{name}_weight_int"].astype(int)).max() == 127
    assert stored["fc_weight_int"].shape == (7, 384)


def test_weights_behind_a_flatten_are_permuted(path: Path, model: TracedModule) -> None:
    weight = dict(model.named_parameters())["fc.weight"].numpy()
    scale = tensors(path)["fc_weight_int"].quantization.scale
    laid = weight.reshape(7, 6, 8, 8).transpose(0, 2, 3, 1).reshape(7, 384)
    dequantized = constants(path)["fc_weight_int"] * scale.reshape(-1, 1)
    np.testing.assert_allclose(dequantized, laid, atol=float(scale.max()) * 0.51)


def test_biases_have_the_scale_of_input_and_weight(path: Path) -> None:
    described = tensors(path)
    for op in load(path).subgraphs[0].operators:
        every = load(path).subgraphs[0].tensors
        if len(op.inputs) < 3:
            continue
        x, weight, bias = (every[int(i)] for i in op.inputs)
        assert bias.type == schema.TensorType.INT32
        want = x.quantization.scale[0] * weight.quantization.scale
        np.testing.assert_allclose(bias.quantization.scale, want, rtol=1e-6)
    assert not constants(path)["depth_weight_zeros"].any()
    assert described["conv_bias_int"].shape.tolist() == [6]


def test_nothing_is_transposed_and_activations_are_fused(path: Path) -> None:
    inside = "QUANTIZE CONV_2D DEPTHWISE_CONV_2D RESHAPE FULLY_CONNECTED DEQUANTIZE"
    assert " ".join(kinds(path)) == inside
    fused = [o.builtinOptions for o in load(path).subgraphs[0].operators]
    activations = schema.ActivationFunctionType
    assert fused[1].fusedActivationFunction == activations.RELU
    assert fused[2].fusedActivationFunction == activations.RELU6


def test_an_ordinary_interpreter_runs_it(path: Path, model: TracedModule) -> None:
    """Without qtrace: channels last, any batch size, names of the graph."""
    loaded = Interpreter(str(path))
    runner = loaded.get_signature_runner()
    (input_name,), (output_name,) = runner.get_input_details(), runner.get_output_details()
    assert (input_name, output_name) == ("x", "fc_out")
    x = images(5, 4, 8, 8, seed=7)
    y = runner(**{input_name: np.ascontiguousarray(x.transpose(0, 2, 3, 1))})[output_name]
    want = model(mge.Tensor(x)).numpy()
    step = float(tensors(path)["fc_out_int"].quantization.scale[0])
    np.testing.assert_allclose(y, want, atol=1.01 * step)
    assert facts(path)["free_batch"]
    assert path.read_bytes()[4:8] == b"TFL3"
    assert load(path).description.startswith(b"qtrace ")


def test_integers_in_and_out(model: TracedModule, tmp_path: Path) -> None:
    path = qtrace.export(model, tmp_path / "m.tflite", io="int8")
    assert kinds(path)[0] == "CONV_2D"
    assert kinds(path)[-1] == "FULLY_CONNECTED"
    loaded = Interpreter(str(path))
    details = [loaded.get_input_details()[0], loaded.get_output_details()[0]]
    assert [d["dtype"] for d in details] == [np.int8, np.int8]
    assert qtrace.verify(path, model, X).passed


def test_networks_are_written_without_transposes(tmp_path: Path) -> None:
    x = images(2, 3, 32, 32)
    prepared = qtrace.prepare(qtrace.trace(randomize(ResNet(8, (1, 1))), x, check=False), "backend/tflite")
    model = qtrace.convert(qtrace.calibrate(prepared, [x], progress=False))
    path = qtrace.export(model, tmp_path / "m.tflite")
    assert "TRANSPOSE" not in kinds(path)
    assert set(kinds(path)[1:-1]) == {
        *("PAD", "CONV_2D", "MAX_POOL_2D", "ADD", "MEAN", "RESHAPE", "FULLY_CONNECTED")
    }


def _after_conv(function: Callable[..., Any]) -> M.Module:
    return net(lambda self, x: function(self.conv(x)), conv=M.Conv2d(4, 6, 3, padding=1))


SIGNED = {"signed": True}
REFUSED: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any], str]] = {
    "unsigned": (F.relu, {"backend": "onnxruntime"}, {}, "site x is uint8 affine.*backend tflite"),
    "4 bits": (F.relu, {"backend": "generic", "activation": {**SIGNED, "bits": 4}}, {}, "site x is int4.*8"),
    "per channel": (F.relu, {"backend": "generic", "activation": {**SIGNED, "axis": 1}}, {}, "axis: null"),
    "half away": (
        F.relu,
        {"backend": "generic", "activation": {**SIGNED, "rounding": "half_away"}},
        {},
        "site x is .*half to even",
    ),
    "affine weight": (
        F.relu,
        {"backend": "generic", "activation": SIGNED, "weight": {"symmetric": False}},
        {},
        "site conv_weight is .*symmetric",
    ),
    "no kernel": (
        lambda y: F.maximum(y, y * 0.5),
        {"backend": "generic", "activation": SIGNED},
        {},
        r"maximum has no integer kernel.*--allow-float maximum.*maximum_out",
    ),
    "no form": (
        lambda y: F.cumsum(F.flatten(y, 1), 1),
        {},
        {},
        "cannot become TFLite yet: end the graph before cumsum_out",
    ),
    "border": (
        lambda y: F.nn.pad(y, ((0, 0), (0, 0), (1, 1), (1, 1)), mode="replicate"),
        {},
        {},
        "pad_out: padding by the border's values cannot become TFLite: use zeros or reflect",
    ),
    "float output": (lambda y: F.softmax(y, 1), {}, {"io": "int8"}, "output softmax_out is float"),
    "io": (F.relu, {}, {"io": "int4"}, "io='int4' is no choice of the TFLite export: choose float32 or int8"),
    "functions": (F.relu, {}, {"functions": "no"}, "choose float or table or native"),
    "allow_float": (F.relu, {}, {"allow_float": "cnv"}, "allow_float names 'cnv', which is no kind of op"),
    "option": (F.relu, {}, {"packed": True}, "tflite lacks option 'packed'; it knows: io, functions, allow"),
}


@each_of("name", REFUSED)
def test_refused_before_anything_is_written(name: str, tmp_path: Path) -> None:
    function, config, options, reason = REFUSED[name]
    model = _converted(_after_conv(function), **config)
    (tmp_path / "m.tflite").write_text("old")
    with pytest.raises(ExportError, match=reason):
        qtrace.export(model, tmp_path / "m.tflite", force=True, **options)
    assert [p.name for p in tmp_path.iterdir()] == ["m.tflite"]
    assert (tmp_path / "m.tflite").read_text() == "old"


def test_what_is_allowed_computes_in_float(tmp_path: Path) -> None:
    model = _converted(_after_conv(lambda y: F.maximum(y, y * 0.5)), backend="generic", activation=SIGNED)
    path = qtrace.export(model, tmp_path / "m.tflite", allow_float=("maximum",))
    inside = kinds(path)
    assert inside[inside.index("MAXIMUM") - 1] == "DEQUANTIZE"
    assert inside[inside.index("MAXIMUM") + 1] == "QUANTIZE"
    assert qtrace.verify(path, model, X).passed


def test_a_table_that_fits_one_batch_size_alone_fixes_the_batch(tmp_path: Path) -> None:
    def forward(self: Any, x: mge.Tensor) -> mge.Tensor:
        return self.conv(x) + F.exp(F.reshape(self.table, (x.shape[0], 6, 1, 1)))

    module = net(forward, conv=M.Conv2d(4, 6, 3), table=mge.Parameter(np.ones((18,), np.float32)))
    path = qtrace.export(_converted(module), tmp_path / "m.tflite")
    assert not facts(path)["free_batch"]


@pytest.mark.parametrize("kind", ["uint8", "uint16", "float16"])
@pytest.mark.parametrize("back", [False, True])
def test_a_conversion_to_a_type_that_files_have_not_is_refused(kind: str, back: bool, tmp_path: Path) -> None:
    def forward(self: Any, x: mge.Tensor) -> mge.Tensor:
        y = (self.conv(x) * 3).astype(kind)
        return y.astype("float32") if back else y

    traced = qtrace.trace(randomize(net(forward, conv=M.Conv2d(4, 4, 1)), 0), X[0], check=False)
    prepared = qtrace.calibrate(qtrace.prepare(traced, "backend/tflite"), X, progress=False)
    file = tmp_path / "net.tflite"
    with pytest.raises(ExportError, match=f"astype_out is {kind}, which is not written to TFLite: use"):
        qtrace.export(qtrace.convert(prepared), file)
    assert not file.exists()

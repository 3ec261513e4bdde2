"""Float files in the form that their runtime computes fast: norms and functions inside of the layers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter

import qtrace
from tests.each import each_of
from tests.nets import ResNet, images, net, randomize

X = images(2, 3, 16, 16)
_NAMES = {value: name for name, value in vars(schema.BuiltinOperator).items()}


def _kinds(path: Path) -> Counter[str]:
    model = schema.ModelT.InitFromPackedBuf(path.read_bytes())
    operators = model.subgraphs[0].operators
    return Counter(_NAMES[model.operatorCodes[op.opcodeIndex].builtinCode] for op in operators)


def _difference(path: Path, module: M.Module) -> float:
    """The largest difference of a file's output to that of its module, as a share of the largest value."""
    loaded = Interpreter(str(path))
    loaded.resize_tensor_input(0, X.transpose(0, 2, 3, 1).shape)
    loaded.allocate_tensors()
    loaded.set_tensor(0, np.ascontiguousarray(X.transpose(0, 2, 3, 1)))
    loaded.invoke()
    own = loaded.get_tensor(loaded.get_output_details()[0]["index"])
    exact = module(mge.Tensor(X)).numpy()
    own = own.transpose(0, 3, 1, 2) if own.ndim == 4 else own
    return float(np.abs(own - exact).max() / np.abs(exact).max())


@pytest.mark.quick(1)
@pytest.mark.parametrize("suffix", [".tflite", ".param"])
def test_a_float_network_has_no_norm_of_its_own_and_verifies(tmp_path: Path, suffix: str) -> None:
    traced = qtrace.trace(randomize(ResNet(8, (1, 1))), X[:1], check=False)
    path = qtrace.export(traced, tmp_path / f"net{suffix}")
    if suffix == ".tflite":
        kinds = _kinds(path)
        assert not kinds["MUL"]
        assert not kinds["RELU"]
    else:
        lines = path.read_text(encoding="utf-8").splitlines()
        assert any(line.startswith("Convolution") for line in lines)
        assert not any(line.startswith("BatchNorm") for line in lines)
    assert qtrace.verify(path, traced, [X[:1]]).passed


def test_the_network_itself_keeps_its_norms(tmp_path: Path) -> None:
    traced = qtrace.trace(randomize(ResNet(8, (1,))), X[:1], check=False)
    before = traced(mge.Tensor(X[:1])).numpy()
    qtrace.export(traced, tmp_path / "net.tflite")
    assert any(isinstance(module, M.BatchNorm2d) for module in traced.modules())
    np.testing.assert_array_equal(traced(mge.Tensor(X[:1])).numpy(), before)


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (F.relu, ""),
        (F.relu6, ""),
        (lambda x: F.clip(x, -1, 1), ""),
        (lambda x: F.clip(x, -0.5, 0.5), "MINIMUM"),
        (F.sigmoid, "LOGISTIC"),
    ],
)
@pytest.mark.parametrize("layer", ["conv", "add", "mul", "div", "linear"])
def test_what_an_operator_fuses_is_no_operator_of_its_own(tmp_path: Path, function, kind, layer) -> None:
    forms = {
        "conv": lambda self, x: function(self.a(x)),
        "add": lambda self, x: function(self.a(x) + self.b(x)),
        "mul": lambda self, x: function(self.a(x) * self.b(x)),
        "div": lambda self, x: function(self.a(x) / (self.b(x) * self.b(x) + 1)),
        "linear": lambda self, x: function(self.c(F.flatten(self.a(x), 1))),
    }
    module = net(forms[layer], a=M.Conv2d(3, 4, 3), b=M.Conv2d(3, 4, 3), c=M.Linear(4 * 14 * 14, 5))
    path = qtrace.export(qtrace.trace(module, X, check=False), tmp_path / "net.tflite")
    kinds = _kinds(path)
    alone = [k for k in ("RELU", "RELU6", "RELU_N1_TO_1", "MINIMUM", "LOGISTIC") if kinds[k]]
    assert alone == ([kind] if kind else [])
    assert _difference(path, module) < 1e-5


@pytest.mark.parametrize("reader", ["output", "both"])
def test_a_value_that_is_read_itself_is_not_clamped(tmp_path: Path, reader: str) -> None:
    def forward(self: M.Module, x: mge.Tensor):
        y = self.a(x)
        return F.relu(y) + y if reader == "both" else (F.relu(y), y)

    traced = qtrace.trace(net(forward, a=M.Conv2d(3, 4, 3)), X[:1], check=False)
    path = qtrace.export(traced, tmp_path / "net.tflite")
    assert _kinds(path)["RELU"] == 1
    assert qtrace.verify(path, traced, [X[:1]]).passed


@each_of(
    ("before", "code"),
    [(F.relu, "PAD"), (F.sigmoid, "PAD"), (lambda x: F.clip(x, 0, 1), "PAD"), (lambda x: x, "PADV2")],
)
def test_only_values_that_may_be_negative_are_padded_with_the_lowest_one(
    tmp_path: Path, before, code
) -> None:
    module = net(
        lambda self, x: self.p(before(self.a(x))), a=M.Conv2d(3, 4, 3, padding=1), p=M.MaxPool2d(3, 2, 1)
    )
    path = qtrace.export(qtrace.trace(module, X, check=False), tmp_path / "net.tflite")
    assert {k: n for k, n in _kinds(path).items() if k.startswith("PAD")} == {code: 1}
    assert _difference(path, module) < 1e-5


def test_a_layer_in_float_between_integers_fuses_what_follows(tmp_path: Path) -> None:
    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        return self.c(F.relu(self.b(F.relu(self.a(x)))))

    module = net(forward, a=M.Conv2d(3, 4, 3), b=M.Conv2d(4, 4, 3), c=M.Conv2d(4, 4, 3))
    config = {"backend": "tflite", "rules": [{"match": {"name": "b*"}, "quantize": False}]}
    prepared = qtrace.calibrate(
        qtrace.prepare(qtrace.trace(module, X[:1], check=False), config), [X], progress=False
    )
    converted = qtrace.convert(prepared)
    path = qtrace.export(converted, tmp_path / "net.tflite")
    assert qtrace.verify(path, converted, [X[:1]]).passed

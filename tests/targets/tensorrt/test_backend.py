"""TensorRT: where its kernels do not round, and what it leaves in float for speed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx
import pytest

import qtrace
from qtrace.graph.types import TracedModule
from qtrace.preparation.annotation import Annotation, ExprNote
from qtrace.preparation.prepare import plan
from tests.each import each_of
from tests.nets import ResNet, images, net, randomize

C = 16


def _conv(inside: int, outside: int, size: int = 3, stride: int = 1, groups: int = 1) -> M.Conv2d:
    return M.Conv2d(inside, outside, size, stride, size // 2, groups=groups, bias=False)


def _basic() -> M.Module:
    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        x = F.relu(self.stem(x))
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return self.head(F.relu(y + x))

    parts = {"stem": _conv(3, C), "conv1": _conv(C, C), "conv2": _conv(C, C), "head": _conv(C, C)}
    return net(forward, **parts, bn1=M.BatchNorm2d(C), bn2=M.BatchNorm2d(C))


def _bottleneck() -> M.Module:
    """With a projection: both inputs of the sum come from convolutions."""

    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        x = F.relu(self.stem(x))
        y = F.relu(self.conv2(F.relu(self.conv1(x))))
        y = self.bn3(self.conv3(y))
        y += self.bn4(self.projection(x))
        return self.head(F.relu(y))

    parts = {"stem": _conv(3, C), "conv1": _conv(C, C, 1), "conv2": _conv(C, C, stride=2)}
    parts |= {"conv3": _conv(C, 2 * C, 1), "projection": _conv(C, 2 * C, 1, 2), "head": _conv(2 * C, C)}
    return net(forward, **parts, bn3=M.BatchNorm2d(2 * C), bn4=M.BatchNorm2d(2 * C))


def _preactivation() -> M.Module:
    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        x = self.stem(x)
        for bn1, conv1, bn2, conv2 in (
            (self.bn1, self.conv1, self.bn2, self.conv2),
            (self.bn3, self.conv3, self.bn4, self.conv4),
        ):
            x = x + conv2(F.relu(bn2(conv1(F.relu(bn1(x))))))
        return self.head(F.relu(x))

    parts = {f"conv{n}": _conv(C, C) for n in range(1, 5)}
    norms = {f"bn{n}": M.BatchNorm2d(C) for n in range(1, 5)}
    return net(forward, stem=_conv(3, C), head=_conv(C, C), **parts, **norms)


def _linear_bottleneck() -> M.Module:
    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        x = F.relu6(self.stem(x))
        for expand, depthwise, project in (
            (self.expand1, self.depthwise1, self.project1),
            (self.expand2, self.depthwise2, self.project2),
        ):
            x = x + project(F.relu6(depthwise(F.relu6(expand(x)))))
        return self.head(x)

    parts = {}
    for n in (1, 2):
        parts |= {f"expand{n}": _conv(C, 2 * C, 1), f"depthwise{n}": _conv(2 * C, 2 * C, groups=2 * C)}
        parts |= {f"project{n}": _conv(2 * C, C, 1)}
    return net(forward, stem=_conv(3, C), head=_conv(C, C), **parts)


def _csp() -> M.Module:
    """The functions behind the convolutions belong to their kernels; the branches share a scale."""

    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        x = F.silu(self.stem(x))
        left, right = F.silu(self.left(x)), F.silu(self.right(x))
        left = left + F.silu(self.conv2(F.silu(self.conv1(left))))
        return self.head(F.concat([left, right], 1))

    parts = {"stem": _conv(3, C), "left": _conv(C, C, 1), "right": _conv(C, C, 1)}
    return net(forward, **parts, conv1=_conv(C, C, 1), conv2=_conv(C, C), head=_conv(2 * C, C))


# Family -> the network, and for each sum the result that it adds unrounded.
FAMILIES: dict[str, tuple[Callable[[], M.Module], list[str]]] = {
    "resnet basic": (_basic, ["conv2_out"]),
    "resnet bottleneck": (_bottleneck, ["conv3_out"]),
    "resnet pre-activation": (_preactivation, ["conv2_out", "conv4_out"]),
    "mobilenet_v2 linear bottleneck": (_linear_bottleneck, ["project1_out", "project2_out"]),
    "csp": (_csp, ["silu_out_4"]),
}


def _traced(module: M.Module, *shape: int) -> TracedModule:
    return qtrace.trace(module, images(1, *(shape or (3, 16, 16))), check=False)


def _converted(module: M.Module, target: str = "backend/tensorrt") -> TracedModule:
    prepared = qtrace.prepare(_traced(module), target)
    qtrace.calibrate(prepared, [images(2, 3, 16, 16)], progress=False)
    return qtrace.convert(prepared)


def _notes(annotation: Annotation, kind: str) -> list[ExprNote]:
    return [note for note in annotation.notes if note.kind == kind]


@pytest.mark.quick(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_rounded_on_the_convolutions_side_of_a_sum(family: str, tmp_path: Path) -> None:
    build, unrounded = FAMILIES[family]
    converted = _converted(build())
    annotation = qtrace.explain(converted).annotation
    sums = _notes(annotation, "add")
    assert [note.reads[note.inputs.index("")] for note in sums] == unrounded
    assert all(note.inputs.count("") == 1 for note in sums)
    path = qtrace.export(converted, tmp_path / "m.onnx")
    model = onnx.load(str(path))
    producers = {name: node.op_type for node in model.graph.node for name in node.output}
    for node in (node for node in model.graph.node if node.op_type == "Add"):
        kinds = [producers[name] for name in node.input]
        assert kinds.count("DequantizeLinear") == 1
        assert set(kinds) <= {"DequantizeLinear", "Conv", "Mul"}
    report = qtrace.verify(path, converted, [images(2, 3, 16, 16)])
    assert report.passed
    assert report.worst_lsb() <= 1


def test_the_file_has_what_the_parser_reads(tmp_path: Path) -> None:
    path = qtrace.export(_converted(randomize(ResNet(8, (1, 1)))), tmp_path / "m.onnx")
    model = onnx.load(str(path))
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 13)]
    stored = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type not in ("QuantizeLinear", "DequantizeLinear"):
            continue
        zero_points = stored[node.input[2]]
        assert zero_points.dtype == np.int8
        assert not zero_points.any()
        assert bool(node.attribute) == (zero_points.ndim == 1)
    biases = [stored[node.input[2]] for node in model.graph.node if node.op_type == "Conv"]
    assert {bias.dtype for bias in biases} == {np.dtype(np.float32)}


def test_what_only_float_ops_read_is_not_rounded() -> None:
    module = net(lambda self, x: F.exp(self.b(F.relu(self.a(x)))), a=_conv(3, C), b=_conv(C, C))
    annotation = plan(_traced(module), "backend/tensorrt")
    assert {s.name for s in annotation.sites if s.sort == "activation"} == {"x", "relu_out"}
    assert "no op on integers reads it" in next(n.reason for n in annotation.notes if n.name == "b_out")


def test_a_rule_for_the_result_of_a_summand_is_kept() -> None:
    module = net(lambda self, x: self.c(self.b(x) + x), b=_conv(C, C), c=_conv(C, C))
    rules = [{"match": {"name": "b_out"}, "output": {"bits": 8}}]
    annotation = plan(_traced(module, C, 8, 8), {"backend": "tensorrt", "rules": rules})
    assert all(all(note.inputs) for note in _notes(annotation, "add"))


SLOW: dict[str, tuple[Callable[[], M.Module], tuple[int, ...], str]] = {
    "few channels": (
        lambda: net(lambda self, x: self.b(self.a(x)), a=_conv(3, 12), b=_conv(12, 32)),
        (3, 8, 8),
        "b_out: a convolution from 12 to 32 channels is no faster on integers",
    ),
    "few columns": (
        lambda: net(lambda self, x: self.a(F.flatten(x, 1)), a=M.Linear(64, 10)),
        (1, 8, 8),
        "a_out: a product of inner size 64 and 10 columns is no faster on integers",
    ),
    "a vector": (
        lambda: net(lambda self, x: F.matmul(x[:, :1], F.transpose(x, (0, 2, 1)))),
        (32, 32),
        "matmul_out: a product with a vector is no faster on integers",
    ),
}


@each_of("case", SLOW)
def test_what_is_no_faster_on_integers_stays_float_unless_a_rule_says_otherwise(case: str) -> None:
    build, shape, expected = SLOW[case]
    traced = _traced(build(), *shape)
    name, reason = expected.split(": ")
    note = next(n for n in plan(traced, "backend/tensorrt").notes if n.name == name)
    assert (note.state, note.causes, note.reason) == ("float", ("speed",), reason)
    rules = [{"match": {"name": name}, "quantize": True}]
    forced = plan(traced, {"backend": "tensorrt", "rules": rules})
    assert next(n for n in forced.notes if n.name == name).state == "int"
    assert "quantize: true" in qtrace.explain(traced, {"backend": "tensorrt"}).summary()


def test_eight_channels_and_the_first_layer_run_on_integers() -> None:
    module = net(lambda self, x: self.b(self.a(x)), a=_conv(3, 8), b=_conv(8, 8))
    notes = plan(_traced(module), "backend/tensorrt").notes
    assert [note.state for note in notes if note.kind == "conv2d"] == ["int", "int"]


def test_a_norm_that_trains_leaves_the_bias_in_float(tmp_path: Path) -> None:
    module = _basic()
    prepared = qtrace.prepare(_traced(module), {"backend": "tensorrt", "qat": {"bn": {"fold": False}}})
    qtrace.calibrate(prepared, [images(2, 3, 16, 16)], progress=False)
    converted = qtrace.convert(prepared)
    assert not [s for s in qtrace.explain(converted).annotation.sites if s.sort == "bias"]
    path = qtrace.export(converted, tmp_path / "m.onnx")
    assert qtrace.verify(path, converted, [images(2, 3, 16, 16)]).passed

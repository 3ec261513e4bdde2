"""Rules: structural selectors, results of their own, shared parameters, regions, and rules without effect."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx
import pytest
from megengine.autodiff import GradManager

import qtrace
from qtrace.config import QConfig
from qtrace.errors import ConfigError, GraphError
from qtrace.graph.types import TracedModule
from qtrace.preparation.annotation import Annotation, ExprNote, Site
from qtrace.preparation.prepare import plan
from tests.nets import images, net

X = images(2, 4, 8, 8)


def _conv(outside: int = 4, **options: Any) -> M.Conv2d:
    return M.Conv2d(4, outside, 3, padding=1, **options)


def _plan(module: M.Module, rules: list[dict[str, Any]] | None = None, **config: Any) -> Annotation:
    return plan(qtrace.trace(module, X, check=False), QConfig(rules=rules or [], **config))


def _matched(module: M.Module, match: dict[str, Any]) -> set[str]:
    annotation = _plan(module, [{"match": match, "quantize": False}])
    return {n.name for n in annotation.notes if "rules[0]" in n.matched}


def _sites(annotation: Annotation) -> dict[str, Site]:
    return {s.name: s for s in annotation.sites if s.sort == "activation"}


def _bits(annotation: Annotation) -> dict[str, int]:
    return {name: site.plan.scheme.bits for name, site in _sites(annotation).items() if site.plan}


def _note(annotation: Annotation, name: str) -> ExprNote:
    return next(n for n in annotation.notes if n.name == name)


def _detector() -> M.Module:
    """One head for two levels; boxes through a learned scale and exp, scores through sigmoid."""

    def forward(self: M.Module, x: mge.Tensor) -> tuple[mge.Tensor, mge.Tensor]:
        levels = [F.relu(self.body(x)), F.relu(self.down(x))]
        boxes = [F.exp(self.box(level) * self.scale).reshape(2, 4, -1) for level in levels]
        scores = [F.sigmoid(self.score(level)).reshape(2, 4, -1) for level in levels]
        return F.concat(boxes, 2), F.concat(scores, 2)

    parts = {"body": _conv(), "down": _conv(stride=2), "box": _conv(), "score": _conv()}
    return net(forward, **parts, scale=mge.Parameter(np.float32([1.5])))


def test_tail_is_what_comes_after_the_last_convolutions() -> None:
    found = _matched(_detector(), {"position": "tail"})
    assert found
    assert not any(name.startswith(("body", "down", "box", "score", "relu")) for name in found)
    every = {n.name for n in _plan(_detector()).notes if n.role not in ("shape", "compute")}
    assert every - found == {n for n in every if n.startswith("relu")}


BINS = 5
_PROJECTION = np.arange(BINS, dtype=np.float32)


def by_conv(self: M.Module, bins: mge.Tensor) -> mge.Tensor:
    """(N, 4 * bins, H, W), as Ultralytics' DFL."""
    n, _, h, w = bins.shape
    bins = bins.reshape(n, 4, BINS, h * w).transpose(0, 2, 1, 3)
    return self.mean(F.softmax(bins, axis=1)).reshape(n, 4, h * w)


def by_linear(self: M.Module, bins: mge.Tensor) -> mge.Tensor:
    """As mmdetection's Integral."""
    n, _, h, w = bins.shape
    bins = bins.transpose(0, 2, 3, 1).reshape(-1, BINS)
    return F.linear(F.softmax(bins, axis=1), self.weights).reshape(n, h * w, 4)


def by_matmul(self: M.Module, bins: mge.Tensor) -> mge.Tensor:
    n, _, h, w = bins.shape
    bins = F.softmax(bins.transpose(0, 2, 3, 1).reshape(n, h * w, 4, BINS), axis=3)
    return F.matmul(bins.reshape(-1, BINS), self.column).reshape(n, h * w, 4)


def by_sum(self: M.Module, bins: mge.Tensor) -> mge.Tensor:
    n, _, h, w = bins.shape
    bins = F.softmax(bins.transpose(0, 2, 3, 1).reshape(n, h * w, 4, BINS), axis=3)
    return F.sum(bins * self.numbers, axis=3)


def distributions(decode: Callable[[M.Module, mge.Tensor], mge.Tensor]) -> M.Module:
    """A head whose boxes are means of distributions, as `decode` computes them, and scores."""

    def forward(self: M.Module, x: mge.Tensor) -> tuple[mge.Tensor, mge.Tensor]:
        x = F.relu(self.body(x))
        return decode(self, self.box(x)) * 8.0, F.sigmoid(self.score(x))

    mean = M.Conv2d(BINS, 1, 1, bias=False)
    mean.weight[...] = mge.Tensor(_PROJECTION.reshape(1, BINS, 1, 1))
    shapes = {"weights": (1, BINS), "column": (BINS, 1), "numbers": (BINS,)}
    numbers = {name: mge.Parameter(_PROJECTION.reshape(shape)) for name, shape in shapes.items()}
    layers = {"body": _conv(), "box": M.Conv2d(4, 4 * BINS, 1), "score": _conv()}
    return net(forward, **layers, **numbers, mean=mean)


@pytest.mark.parametrize("decode", [by_conv, by_linear, by_matmul, by_sum])
def test_the_mean_of_a_distribution_belongs_to_the_tail_whoever_wrote_it(decode: Any) -> None:
    module = distributions(decode)
    found = _matched(module, {"position": "tail"})
    assert any(name.startswith("softmax") for name in found)
    assert _matched(module, {"position": "last"}) == {"box_out", "score_out"}
    notes = {n.name for n in _plan(module).notes if n.role not in ("shape", "carry")}
    assert notes - found == {"body_out", "relu_out", "box_out", "score_out"}


def test_products_of_attention_are_no_means_of_distributions() -> None:
    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        rows = x.reshape(2, 4, -1)
        shares = F.softmax(F.matmul(rows, rows.transpose(0, 2, 1)), axis=-1)
        return self.scores(F.matmul(shares, rows).reshape(x.shape))

    def classify(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        return self.fc(F.softmax(F.mean(x, axis=(2, 3)), axis=1))

    assert _matched(net(forward, scores=_conv()), {"position": "last"}) == {"scores_out"}
    assert _matched(net(classify, fc=M.Linear(4, 3)), {"position": "last"}) == {"fc_out"}


def test_feeds_sees_through_scales_and_follows_through_activations() -> None:
    assert _matched(_detector(), {"op": "conv2d", "feeds": "exp"}) == {"box_out", "box_1_out"}
    assert _matched(_detector(), {"op": "conv2d", "feeds": "sigmoid"}) == {"score_out", "score_1_out"}
    boxes = _matched(_detector(), {"op": "conv2d", "follows": "conv2d"})
    assert boxes == {"box_out", "box_1_out", "score_out", "score_1_out"}


def test_shared_is_a_weight_of_several_calls() -> None:
    found = _matched(_detector(), {"shared": True})
    assert found == {"box_out", "box_1_out", "score_out", "score_1_out"}


def test_gate_is_what_scales_channels() -> None:
    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        x = self.c(x)
        gate = F.sigmoid(self.fc(F.mean(x, axis=(2, 3), keepdims=True)))
        return x * gate * F.sigmoid(x)

    module = net(forward, c=_conv(), fc=M.Conv2d(4, 4, 1))
    assert _matched(module, {"gate": True, "op": "sigmoid"}) == {"sigmoid_out"}


def test_a_result_can_have_a_scheme_of_its_own_and_readers_round_again() -> None:
    module = net(lambda self, x: self.b(self.a(x)), a=_conv(), b=_conv())
    rule = {"match": {"name": "a"}, "output": {"bits": 16}}
    annotation = _plan(module, [rule])
    assert _bits(annotation) == {"x": 8, "a_out": 16, "a_out__b_out": 8, "b_out": 8}
    prepared = qtrace.prepare(qtrace.trace(module, X, check=False), QConfig(rules=[rule]))
    qtrace.calibrate(prepared, [X], progress=False)
    sites = prepared.qsites
    names = [n.name for e in prepared.graph._exprs for n in e.outputs]
    assert names.index("a_out_q") < names.index("a_out__b_out_q")
    reader = next(e for e in prepared.graph._exprs for n in e.outputs if n.name == "a_out__b_out_q")
    assert any(n.name == "a_out_q" for n in reader.inputs)
    assert sites.a_out.scheme.bits == 16
    np.testing.assert_array_equal(
        qtrace.convert(prepared)(mge.Tensor(X)).numpy(), prepared(mge.Tensor(X)).numpy()
    )


def test_readers_who_want_the_scheme_of_a_result_choose_its_observer_and_round_nothing_again() -> None:
    module = net(lambda self, x: self.b(self.a(x)) + self.c(self.a(x)), a=_conv(), b=_conv(), c=_conv())
    own = {"match": {"name": "a"}, "output": {"bits": 16}, "observers": {"activation": "mse"}}
    wide = {"match": {"name": ["b", "c"]}, "activation": {"bits": 16}, "observers": {"activation": "minmax"}}
    sites = _sites(_plan(module, [own, wide]))
    assert set(sites) == {"x", "a_out", "a_1_out", "b_out", "c_out", "add_out"}
    assert {sites[name].plan.observer for name in ("a_out", "a_1_out")} == {"minmax"}
    assert {sites[name].plan.scheme.bits for name in ("a_out", "a_1_out")} == {16}


def test_a_result_can_stay_in_float() -> None:
    module = net(lambda self, x: self.b(self.a(x)), a=_conv(), b=_conv())
    annotation = _plan(module, [{"match": {"before_output": True}, "quantize_output": False}])
    assert set(_sites(annotation)) == {"x", "a_out"}
    assert _note(annotation, "b_out").state == "int"
    assert _note(annotation, "b_out").reason.endswith("the config says quantize_output: false")


def test_a_rule_for_a_fused_activation_is_about_the_result_and_says_so() -> None:
    module = net(lambda self, x: F.relu(self.a(x)), a=_conv())
    annotation = _plan(module, [{"match": {"op": "relu"}, "activation": {"bits": 16}}])
    assert _bits(annotation) == {"x": 8, "relu_out": 16}
    assert "rules[0] changes its result only" in _note(annotation, "relu_out").reason


def test_share_ties_what_the_calls_of_one_module_read_and_give() -> None:
    module = _detector()
    apart = _plan(module)
    assert len({s.group for s in _sites(apart).values()}) == len(_sites(apart))
    shared = _plan(module, [{"match": {"shared": True}, "share": True}])
    sites = _sites(shared)
    assert sites["box_out"].group == sites["box_1_out"].group
    assert sites["score_out"].group == sites["score_1_out"].group
    assert sites["relu_out"].group == sites["relu_out_1"].group
    weights = [s for s in shared.sites if s.sort == "weight"]
    assert len({s.group for s in weights}) == len(weights) == 4


def test_float_ops_can_be_quantized_around() -> None:
    module = net(lambda self, x: self.b(F.softmax(self.a(x), axis=1)), a=_conv(), b=_conv())
    assert _note(_plan(module), "softmax_out").state == "float"
    annotation = _plan(module, [{"match": {"op": "softmax"}, "quantize": True, "activation": {"bits": 16}}])
    assert _note(annotation, "softmax_out").state == "int"
    assert _bits(annotation) == {"x": 8, "a_out": 16, "softmax_out": 8, "b_out": 8}
    with pytest.raises(ConfigError, match=r"rules\[0\]: backend megengine has no integer kernel for softmax"):
        _plan(module, [{"match": {"op": "softmax"}, "quantize": True}], backend="megengine")


def test_rules_for_other_backends_and_optional_rules_are_passed_over() -> None:
    module = net(lambda self, x: self.a(x), a=_conv())
    nothing = {"match": {"op": "silu"}, "quantize": False}
    with pytest.raises(ConfigError, match=r"rules\[0\]: .* matches no op"):
        _plan(module, [nothing])
    _plan(module, [{**nothing, "optional": True}])
    _plan(module, [{**nothing, "backends": ["megengine"]}])
    with pytest.raises(ConfigError, match="unknown backend 'tensorr'"):
        QConfig(rules=[{**nothing, "backends": ["tensorr"]}])


def test_a_rule_about_weights_needs_an_op_with_one() -> None:
    module = net(lambda self, x: F.relu(self.a(x)), a=_conv())
    with pytest.raises(ConfigError, match=r"rules\[0\]: .*weights only, which matched ops \(relu\) lack"):
        _plan(module, [{"match": {"op": "relu"}, "weight": {"bits": 4}}])


def _prepared_sites(module: M.Module, **region: Any) -> set[str]:
    prepared = qtrace.prepare(qtrace.trace(module, X, check=False), **region)
    found = [f"{s.name}_q" for s in qtrace.explain(prepared).annotation.sites if s.sort == "activation"]
    names = {n.name for e in prepared.graph._exprs for n in e.outputs}
    assert set(found) <= names
    return {name.removesuffix("_q") for name in found}


def test_a_region_quantizes_only_what_lies_inside() -> None:
    module = net(
        lambda self, x: F.exp(self.c(F.relu(self.b(self.a(x))))) * 2.0, a=_conv(), b=_conv(), c=_conv()
    )
    assert _prepared_sites(module, outputs="c") == {"x", "a_out", "relu_out", "c_out"}
    assert _prepared_sites(module, outputs="relu_out") == {"x", "a_out", "relu_out"}
    assert _prepared_sites(module, inputs=["b"], outputs="c_out") == {"a_out", "relu_out", "c_out"}
    annotation = _plan(module, region={"outputs": ["relu_*"]})
    assert _note(annotation, "c_out").reason == "it lies outside of the region"
    with pytest.raises(ConfigError, match=r"QConfig: region.outputs names 'd', which is no node or module"):
        _plan(module, region={"outputs": "d"})
    with pytest.raises(ConfigError, match="no op lies between"):
        _plan(module, region={"inputs": "c", "outputs": "a"})


def test_values_from_shapes_and_constants_alone_stay_float() -> None:
    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        grid = F.arange(x.shape[3]).reshape(1, 1, 1, -1) * 2.0 + 0.5
        return self.a(x) + grid

    annotation = _plan(net(forward, a=_conv()))
    states = {n.name: (n.state, n.reason) for n in annotation.notes if n.kind in ("mul", "add")}
    made = [state for state in states.values() if state[0] == "shape"]
    assert len(made) == 2
    assert all(reason == "it is computed only from shapes and constants" for _, reason in made)


def test_macs_and_float_islands() -> None:
    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        y = F.exp(F.softmax(self.a(x), axis=1))
        return F.exp(self.b(y) + F.exp(self.a(y)))

    annotation = _plan(net(forward, a=_conv(), b=_conv()))
    islands = {n.name: n.island for n in annotation.notes if n.state == "float"}
    assert islands == {"softmax_out": 1, "exp_out": 1, "exp_out_1": 2, "exp_out_2": 0}
    assert _note(annotation, "a_out").macs == 2 * 4 * 8 * 8 * 4 * 9


def test_a_float_op_names_the_rule_that_keeps_it_there_and_all_that_would() -> None:
    module = net(lambda self, x: self.b(F.softmax(self.a(x), axis=1)), a=_conv(), b=_conv())
    rules = [
        {"match": {"op": ["softmax", "conv2d"]}, "quantize": False},
        {"match": {}, "weight": {"bits": 4}},
    ]
    annotation = _plan(module, rules, region={"outputs": "softmax_out"})
    softmax, conv = _note(annotation, "softmax_out"), _note(annotation, "b_out")
    assert softmax.reason == "rules[0] says quantize: false"
    assert softmax.causes == ("rule", "role")
    assert softmax.ranks == (0, 1)
    assert conv.causes == ("region", "rule")
    assert annotation.origins == ("rules[0]", "rules[1]")


def test_notes_tell_what_is_read_and_asked_for() -> None:
    module = net(lambda self, x: self.b(F.flatten(F.relu(self.a(x)), 1)), a=_conv(), b=M.Linear(256, 3))
    annotation = _plan(module, [{"match": {"name": "b"}, "observers": {"activation": {"mse": {"bins": 64}}}}])
    assert [_note(annotation, n).reads for n in ("relu_out", "flatten_out")] == [("a_out",), ("relu_out",)]
    asked = "uint8 affine, mse(bins=64), fixed"
    assert [_note(annotation, n).asks for n in ("relu_out", "flatten_out", "b_out")] == ["", asked, asked]


def test_other_factors_change_the_scale_only_in_front_of_products() -> None:
    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        y = F.relu(self.a(x))
        return (y * 0.3) * self.b(x) + (y * 0.7)

    prepared = qtrace.prepare(qtrace.trace(net(forward, a=_conv(), b=_conv()), X, check=False))
    states = [note.state for note in qtrace.explain(prepared).annotation.notes if note.kind == "mul"]
    assert states == ["carried", "int", "int"]


def test_a_multiplicationby_a_power_of_two_changes_the_scale_only(tmp_path: Path) -> None:
    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        y = F.relu(self.a(x))
        return self.b(y * 0.25) + self.c((y / 2.0).transpose(0, 1, 3, 2)) * 0.3

    module = net(forward, a=_conv(), b=_conv(), c=_conv())
    prepared = qtrace.prepare(qtrace.trace(module, X, check=False))
    annotation = qtrace.explain(prepared).annotation
    notes = {n.kind: n for n in annotation.notes if n.kind in ("mul", "div") and n.state == "carried"}
    assert notes["mul"].reason == "the integers stay: it multiplies their scale by 0.25"
    assert sorted(annotation.factors.values()) == [0.25, 0.5, 0.5]
    assert {s.factor for s in annotation.sites if s.sort == "bias"} == {1.0, 0.25, 0.5}
    qtrace.calibrate(prepared, [X], progress=False)
    converted = qtrace.convert(prepared)
    np.testing.assert_array_equal(converted(mge.Tensor(X)).numpy(), prepared(mge.Tensor(X)).numpy())
    path = qtrace.export(converted, tmp_path / "m.onnx")
    report = qtrace.verify(path, converted, [X])
    assert report.passed
    assert report.worst_lsb() == 0
    assert sum(n.op_type == "Mul" for n in onnx.load(path).graph.node) == 1


def _finite(module: M.Module) -> tuple[float, TracedModule]:
    """The quantized output's ratio of signal to noise in dB, after a check that gradients are finite."""
    prepared = qtrace.prepare(qtrace.trace(module, X, check=False))
    qtrace.calibrate(prepared, [X], progress=False)
    want, got = module(mge.Tensor(X)).numpy(), prepared(mge.Tensor(X)).numpy()
    assert np.isfinite(got).all()
    qtrace.set_phase(prepared, "train")
    parameters = list(prepared.parameters())
    manager = GradManager().attach(parameters)
    with manager:
        manager.backward(F.mean(prepared(mge.Tensor(X)) ** 2))
    assert all(p.grad is None or np.isfinite(p.grad.numpy()).all() for p in parameters)
    noise = np.sum((want - got) ** 2, dtype=np.float64)
    return float(10 * np.log10(np.sum(want**2, dtype=np.float64) / noise)), prepared


@pytest.mark.usefixtures("synchronous")
@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: F.log(F.clip(F.sigmoid(self.a(x) * 6), 1e-4, 1.0)),
        lambda self, x: F.sqrt(F.sigmoid(self.a(x) * 6)),
        lambda self, x: (lambda e: e / F.sum(e, axis=1, keepdims=True))(F.exp(self.a(x) * 4)),
        lambda self, x: self.a(x) / (F.maximum(self.b(x), 0.0).sum(axis=1, keepdims=True) + 1e-3),
        lambda self, x: F.log((F.sigmoid(self.a(x) * 6) + 1e-3).reshape(2, -1)),
    ],
    ids=["log", "sqrt", "softmax by hand", "small denominators", "log after a move"],
)
def test_what_must_not_be_zero_is_not_rounded(forward: Any) -> None:
    quality, prepared = _finite(net(forward, a=_conv(), b=_conv()))
    assert quality > 15
    annotation = qtrace.explain(prepared).annotation
    assert any(n.state == "int" for n in annotation.notes)
    division = [n for n in annotation.notes if n.kind == "div"]
    assert all("denominator" in n.reason for n in division)


def test_what_a_kernel_takes_in_needs_no_kernel_of_its_own() -> None:
    module = net(lambda self, x: self.b(F.relu(self.a(x))), a=_conv(), b=_conv())
    annotation = _plan(module, backend="ncnn")
    assert _note(annotation, "relu_out").into == "a_out"
    assert set(_sites(annotation)) == {"x", "relu_out", "b_out"}


def _file_of_exporter(path: Path) -> Path:
    """Writes a network with the names of PyTorch's exporter: a layer, SiLU in pieces, and a linear layer."""
    make = onnx.helper.make_node
    nodes = [
        make("Conv", ["x", "w"], ["convolved"], name="/stem/Conv", pads=[1] * 4),
        make("BatchNormalization", ["convolved", *"bbbb"], ["/stem/Conv_output_0"], name="/stem/bn"),
        make("Sigmoid", ["/stem/Conv_output_0"], ["/act/Sigmoid_output_0"], name="/act/Sigmoid"),
        make("Mul", ["/stem/Conv_output_0", "/act/Sigmoid_output_0"], ["/act/Mul_output_0"], name="/act/Mul"),
        make("GlobalAveragePool", ["/act/Mul_output_0"], ["p"], name="/pool/GlobalAveragePool"),
        make("Flatten", ["p"], ["f"], name="/Flatten"),
        make("MatMul", ["f", "m"], ["product"], name="/blocks.0/mlp/fc1/MatMul"),
        make("Add", ["product", "b"], ["y"], name="/blocks.0/mlp/fc1/Add"),
    ]
    shapes = {"w": (4, 4, 3, 3), "m": (4, 4), "b": (4,)}
    arrays = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    graph = onnx.helper.make_graph(
        nodes,
        "g",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 4, 8, 8])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    onnx.save(
        onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8), path
    )
    return path


def _saved_and_loaded(traced: TracedModule, folder: Path) -> TracedModule:
    qtrace.save(traced, folder / "net.mge")
    return qtrace.load(folder / "net.mge")


@pytest.mark.parametrize("change", [lambda traced, _: traced, _saved_and_loaded])
def test_nodes_and_tensors_of_the_file_are_names_of_its_ops(tmp_path: Path, change: Callable) -> None:
    traced = change(qtrace.from_onnx(_file_of_exporter(tmp_path / "net.onnx")), tmp_path)
    for match, kinds in (
        ({"name": "/blocks.0/mlp/fc1/MatMul"}, {"linear"}),
        ({"name": "/blocks.0/*"}, {"linear"}),
        ({"name": ["/stem/Conv", "/pool/GlobalAveragePool"]}, {"conv2d", "adaptive_avg_pool2d"}),
        ({"name": "/act/Mul_output_0"}, {"silu"}),
        ({"name": "/act/Sigmoid"}, {"silu"}),
        ({"name": "/stem/bn"}, {"conv2d"}),
        ({"name": "/act/Sigmoid_output_0"}, {"silu"}),
        ({"name": ["product", "/blocks.0/mlp/fc1/Add"]}, {"linear"}),
        ({"subgraph": {"from": "/stem/Conv", "to": "/act/Mul"}}, {"conv2d", "silu"}),
    ):
        config = QConfig(rules=[{"match": match, "quantize": False}])
        notes = [n for n in plan(traced, config).notes if "rules[0]" in n.matched]
        assert {n.kind for n in notes} == kinds, match
        for name in [match["name"]] if isinstance(match.get("name"), str) else ():
            prepared = qtrace.prepare(traced, config)
            for explanation in (qtrace.explain(traced, config), qtrace.explain(prepared)):
                assert [story.title for story in explanation.why(name)] == [n.name for n in notes]
    with pytest.raises(GraphError, match="the nearest are .*/blocks.0/mlp/fc1/MatMul"):
        qtrace.explain(traced).why("/blocks.0/mlp/fc2/MatMul")
    match = {"subgraph": {"from": "/stem/Gemm", "to": "y"}}
    config = QConfig(rules=[{"match": match, "quantize": False}])
    with pytest.raises(ConfigError, match="subgraph names the node '/stem/Gemm', which this graph does not"):
        plan(traced, config)


def test_nodes_of_a_file_of_our_own_are_names_too(tmp_path: Path) -> None:
    layers = {"conv": _conv(), "fc": M.Linear(4, 3)}
    module = net(lambda self, x: self.fc(F.mean(F.relu(self.conv(x)), (2, 3))), **layers)
    path = qtrace.export(qtrace.trace(module, X, check=False), tmp_path / "own.onnx")
    names = {n.op_type: n.name for n in onnx.load(path).graph.node}
    traced = qtrace.from_onnx(path)
    for op, kind in (("Conv", "conv2d"), ("Relu", "relu"), ("ReduceMean", "mean"), ("Gemm", "linear")):
        config = QConfig(rules=[{"match": {"name": names[op]}, "quantize": False}])
        assert [n.kind for n in plan(traced, config).notes if "rules[0]" in n.matched] == [kind]

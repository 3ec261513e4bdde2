"""Source of a traced module: the same bits, the same names, and code that a person reads."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx
import onnx.helper as oh
import pytest
from megengine.core.ops.builtin import GetVarShape
from megengine.traced_module import register_as_builtin

import qtrace
from qtrace import graph as g
from qtrace.errors import GraphError
from qtrace.extras.source.literals import WIDTH, Literals
from qtrace.graph.builder import GraphBuilder
from tests.each import each_of
from tests.nets import images, net, randomize
from tests.zoo.catalog import CNN
from tests.zoo.detectors.entries import DETECTORS
from tests.zoo.transformers.entries import TRANSFORMERS


def run(net: Any, arguments: tuple[Any, ...]) -> list[np.ndarray]:
    return leaves(net(*map(tensors, arguments)))


def tensors(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: tensors(each) for key, each in value.items()}
    return mge.Tensor(value) if isinstance(value, np.ndarray) else value


def leaves(value: Any) -> list[np.ndarray]:
    if isinstance(value, mge.Tensor):
        return [value.numpy()]
    parts = [value[key] for key in sorted(value)] if isinstance(value, dict) else value
    return [array for part in parts for array in leaves(part)]


def load(source: g.PythonSource, folder: Path) -> Any:
    """Imports the written file, as a user does, and loads the network."""
    path = source.save(folder)
    name = f"written_{abs(hash(str(path)))}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module.load()


def equal(first: list[np.ndarray], second: list[np.ndarray]) -> bool:
    same = (
        np.array_equal(a, b, equal_nan=True) and a.dtype == b.dtype
        for a, b in zip(first, second, strict=True)
    )
    return all(same)


def check(traced: Any, arguments: tuple[Any, ...], folder: Path, retrace: bool = True) -> str:
    """Holds the written network, and a trace of it, to ``traced``; returns the code."""
    source = g.to_source(traced)
    net = load(source, folder)
    wanted = run(traced, arguments)
    assert equal(run(net, arguments), wanted)
    assert net.state_dict().keys() == source.weights.keys()
    assert source.weights.keys() >= traced.state_dict().keys()
    if retrace:
        again = qtrace.trace(net, *map(tensors, arguments), check=False)
        assert equal(run(again, arguments), wanted)
    return source.code


class Block(M.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c = M.Conv2d(3, 3, 1)

    def forward(self, x: Any, scale: int = 2, extra: Any = None) -> Any:
        y = self.c(x) * scale
        return y if extra is None else {"a": y, "b": [x, extra]}


class Spellings(M.Module):
    """Lists, dicts and sequences of modules, constants, writes, and sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [Block(), Block()]
        self.heads = {"k": M.Conv2d(3, 3, 1)}
        self.tail = M.Sequential(M.ReLU(), M.Sequential(M.Sigmoid(), Block()))
        self.last = Block()
        self.gain = mge.Parameter(np.full((1, 3, 1, 1), 0.3, np.float32))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        x = self.tail(self.heads["k"](x))
        parts = self.last(x, 3, extra=x + 1)
        y = mge.Tensor(np.arange(48, dtype=np.float32).reshape(1, 3, 4, 4)) + x * np.float32(0.1)
        y[:, 0] = 1.0
        y *= self.gain
        shape = y.shape
        z = (-2.0 - y.reshape(shape[0], -1, shape[2] * shape[3]) ** 2) / 7
        left, right = F.split(z, 2, axis=2)
        return parts["a"] + parts["b"][1], (left.astype("int32"), [right[..., ::2, None] > -3.0])


def test_a_module_with_all_spellings(tmp_path: Path) -> None:
    net = randomize(Spellings())
    x = images(1, 3, 4, 4)
    code = check(qtrace.trace(net, x, check=False), (x,), tmp_path)
    for line in (
        "self.layers[1] = Layers0()",  # two blocks of the same text are one class
        "self.heads.k = M.Conv2d(3, 3, 1)",
        "self.tail = M.Sequential(",
        "layers_0_out = self.layers[0](x)",
        "[:, 0] = 1.0",
        " *= self.gain",
        ".shape\n",
        "[..., ::2, None]",
        "F.split(",
    ):
        assert line in code, line
    assert "device=None" not in code  # a function takes it by itself


class Sizes(M.Module):
    """Sizes that numbers stand for, and sizes that are Tensors in any case."""

    def forward(self, x: Any) -> Any:
        n, c, h, w = x.shape[0], x.shape[1], x.shape[2], x.shape[3]
        rows = F.broadcast_to(F.arange(1, h).reshape(h - 1, 1), (n, c, h - 1, 2 * w))
        area = F.vision.interpolate(x, (h * 2, -w + w * 3), mode="nearest")
        same = F.full(x.shape, 2) + F.zeros(x.shape) + F.ones((n, 1, h, w)) + x[:, : c - 1, : h // 2 + h]
        small = F.vision.interpolate(area, x.shape[2:])
        return rows, area, same, small.reshape(n, -1), F.broadcast_to(x[:1, :1], x.shape)


def test_sizes_are_read_as_shapes_and_stay_open(tmp_path: Path) -> None:
    x, y = images(2, 2, 3, 4), images(3, 2, 5, 6)
    traced = qtrace.trace(Sizes(), x, check=False)
    code = check(traced, (x,), tmp_path)
    assert "GetVarShape" not in code
    net = load(g.to_source(traced), tmp_path / "other")
    again = qtrace.trace(net, x, check=False)
    for other in (net, again):  # run as Python with numbers, and with the Tensors of a trace
        assert equal(run(other, (y,)), run(traced, (y,)))
    assert "size_2 = x.shape[2]\n" in code
    assert "F.arange(1, size_2)" in code
    assert "F.full(x.shape, 2)" in code


def test_sizes_that_ops_compute_with_stay_tensors(tmp_path: Path) -> None:
    builder = GraphBuilder()
    x = builder.input("x", (2, 2, 3, 4), batch_axis=0)
    shapes = [builder.call_kernel(GetVarShape(), x) for _ in range(3)]
    sizes = [builder.call_method("__getitem__", shape, 0) for shape in shapes]
    picked = builder.call_method("__getitem__", x, (0, 0, 1))
    indexed = builder.call_method(
        "__getitem__", builder.call_function(F.arange, 9), builder.call_method("__sub__", sizes[0], 1)
    )
    half = builder.call_method("__truediv__", builder.call_method("astype", sizes[1], "float32"), 2)
    product = builder.call_method("__mul__", x, sizes[2])
    whole = builder.call_kernel(GetVarShape(), x)
    traced = builder.finish((picked, indexed, half, product, whole))
    x1, y = images(2, 2, 3, 4), images(3, 2, 3, 4)
    code = check(traced, (x1,), tmp_path, retrace=False)
    assert code.count("builtin.GetVarShape()") == 4
    assert "x * shape_2[0]" in code
    assert equal(run(load(g.to_source(traced), tmp_path / "other"), (y,)), run(traced, (y,)))


def test_a_shape_that_is_read_behind_a_write(tmp_path: Path) -> None:
    class Written(M.Module):
        def forward(self, x: Any, y: Any) -> Any:
            z = x + 0
            rows = z.shape[0]
            z += y
            return F.broadcast_to(z[:1], (rows, 3, 3))

    x, y = images(1, 3, 3), images(4, 3, 3)
    traced = qtrace.trace(Written(), x, y, check=False)
    assert "shape = " in check(traced, (x, y), tmp_path)


class Functions(M.Module):
    def forward(self, x: Any, y: Any, i: Any) -> Any:
        total = F.add(F.mul(x, float(np.float32(0.1))), F.sub(-2.0, F.div(y, 3)))
        return F.matmul(total, y), F.add(i, 1), F.mul(i, x), x[0,], F.matmul(x, y, transpose_b=True)


def test_functions_are_the_operators_that_they_are(tmp_path: Path) -> None:
    x, y, i = images(1, 3, 3)[0], images(1, 3, 3, seed=1)[0], np.arange(9, dtype=np.int32).reshape(3, 3)
    code = check(qtrace.trace(Functions(), x, y, i, check=False), (x, y, i), tmp_path)
    for line in (
        "x * 0.1\n",
        "y / 3\n",
        "= (-2.0) - ",
        " @ y\n",
        "F.add(i, 1)",
        "F.mul(i, x)",
        "x[0]\n",
        "True)",
    ):
        assert line in code, line


def test_members_stand_in_the_order_of_their_use(tmp_path: Path) -> None:
    class Ordered(M.Module):
        def __init__(self) -> None:
            super().__init__()
            self.z, self.m, self.a = M.Conv2d(3, 4, 1), M.BatchNorm2d(4), M.Conv2d(4, 2, 1)

        def forward(self, x: Any) -> Any:
            return self.a(F.relu(self.m(self.z(x))))

    x = images(1, 3, 4, 4)
    code = check(qtrace.trace(randomize(Ordered()), x, check=False), (x,), tmp_path)
    assert code.index("self.z = ") < code.index("self.m = ") < code.index("self.a = ")


class LongNames(M.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("encoder_stage_with_a_long_name_of_forty", "decoder_stage_with_a_long_name_of_forty"):
            setattr(self, name, M.Conv2d(3, 3, 1))

    def forward(self, x: Any) -> Any:
        first = self.encoder_stage_with_a_long_name_of_forty(x)
        second = self.decoder_stage_with_a_long_name_of_forty(first)
        return F.add(first, second), F.concat([first, second], 1)


def test_lines_are_no_longer_than_a_screen(tmp_path: Path) -> None:
    x = images(1, 3, 4, 4)
    code = check(qtrace.trace(randomize(LongNames()), x, check=False), (x,), tmp_path)
    assert max(map(len, code.splitlines())) <= 110


@each_of("size", [8, 9])
def test_constants_of_few_values_stand_in_the_code(size: int, tmp_path: Path) -> None:
    x, number = images(1, size, 1, 1), mge.Tensor(np.arange(size, dtype=np.float32).reshape(size, 1, 1))
    code = check(qtrace.trace(net(lambda self, x: x * number), x, check=False), (x,), tmp_path)
    assert ("mge.Tensor(np.array(" in code) is (size == 8)


def test_lines_are_as_full_as_they_may_be() -> None:
    full, more = (Literals().write(["a" * 43, "b" * size, "c" * 10]) for size in (42, 43))
    assert [*map(len, full.splitlines()[1:-1])] == [4 + WIDTH - 8, 4 + 13]
    assert [*map(len, more.splitlines()[1:-1])] == [4 + 46, 4 + 46 + 14]


class Norms(M.Module):
    """Numbers as an imported file gives them: those of its float32."""

    def __init__(self) -> None:
        super().__init__()
        self.usual = M.BatchNorm2d(3, eps=float(np.float32(1e-5)))
        self.other = M.BatchNorm2d(3, eps=float(np.float32(1e-3)))
        self.double = M.BatchNorm2d(3, eps=1.00000000001e-3)
        self.wide = M.LayerNorm(4, eps=float(np.float32(2e-6)))

    def forward(self, x: Any) -> Any:
        x = self.double(self.other(self.usual(x)))
        y = self.wide(x) * float(np.float32(0.1)) + float(np.float32(1 / 3))
        return float(np.float32(0.7)) - F.layer_norm(y, (4,), False, eps=float(np.float32(1e-7))), y > 0.1


def test_numbers_of_float32_are_written_short(tmp_path: Path) -> None:
    x = images(2, 3, 4, 4)
    code = check(qtrace.trace(randomize(Norms()), x, check=False), (x,), tmp_path)
    for line in (
        "self.usual = M.BatchNorm2d(3)\n",
        "self.other = M.BatchNorm2d(3, eps=0.001)",
        "self.double = M.BatchNorm2d(3, eps=0.00100000000001)",
        "self.wide = M.LayerNorm((4,), eps=2e-06)",
        " * 0.1\n",
        " + 0.33333334\n",
        "= 0.7 - ",
        ", 1e-07)",
        "> 0.1",
    ):
        assert line in code, line


class Arguments(M.Module):
    def forward(self, pair: Any, mode: Any, x: Any, *, mask: Any) -> Any:
        return pair["left"] * x + pair["right"][0] * mask


def test_arguments_keep_their_structure(tmp_path: Path) -> None:
    a, b, c, d = (images(1, 2, 3, 3, seed=seed) for seed in range(4))
    pair = {"left": mge.Tensor(a), "right": [mge.Tensor(b)]}
    traced = qtrace.trace(Arguments(), pair, 2, mge.Tensor(c), mask=mge.Tensor(d), check=False)
    net = load(g.to_source(traced), tmp_path)
    result = net(pair, 2, mge.Tensor(c), mask=mge.Tensor(d))
    np.testing.assert_array_equal(result.numpy(), a * c + b * d)


def test_an_argument_that_the_trace_holds_is_checked(tmp_path: Path) -> None:
    class Scaled(M.Module):
        def forward(self, mode: str, x: Any, scale: float = 2.0, *, flag: bool = True) -> Any:
            return x * scale if flag else x

    x = mge.Tensor(images(1, 2, 3, 3))
    source = g.to_source(qtrace.trace(Scaled(), "train", x, check=False))
    assert "def forward(self, mode, x, scale=2.0, *, flag=True):" in source.code
    net = load(source, tmp_path)
    for arguments, options in ((("train", x), {}), (("train", x, 2.0), {"flag": True})):
        np.testing.assert_array_equal(net(*arguments, **options).numpy(), x.numpy() * 2)
    for arguments, options in ((("test", x), {}), (("train", x, 3.0), {}), (("train", x), {"flag": False})):
        with pytest.raises(AssertionError, match="the trace holds these arguments"):
            net(*arguments, **options)


class Scaling(M.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = mge.Parameter(np.full((1, 3, 1, 1), 1.5, np.float32))

    def forward(self, x: Any) -> Any:
        return F.tanh(x) * self.gain


class OddNames(M.Module):
    """Submodules and arguments whose names the source uses itself, or that no identifier is."""

    def __init__(self) -> None:
        super().__init__()
        self.m, self.f, self.path, self.group, self.np, self.net = (Scaling() for _ in range(6))
        self.odd = {"a-b": M.Conv2d(3, 3, 1), "1x": Scaling(), "if": M.ReLU()}
        setattr(self, "class", Scaling())

    def forward(self, input: Any, abs: Any, sum: Any) -> Any:
        for name in ("m", "f", "path", "group", "np", "net", "class"):
            input = getattr(self, name)(input)
        for layer in self.odd.values():
            input = layer(input)
        return {"a-b": input, "class": F.abs(abs) + -sum, "1": abs.__abs__()}


def test_names_that_the_source_uses_itself(tmp_path: Path) -> None:
    arguments = images(1, 3, 4, 4), images(1, 2, 2), images(1, 2, 2, seed=1)
    module = randomize(OddNames())
    traced = qtrace.trace(module, *arguments, check=False)
    code = check(traced, arguments, tmp_path)
    assert "def forward(self, input, abs_1, sum):" in code  # abs is called
    assert "= abs(" in code
    assert code.count("(M.Module):") == 3  # Group, one for all seven, and the network
    x, a, b = map(mge.Tensor, arguments)
    net = load(g.to_source(traced), tmp_path / "again")
    np.testing.assert_array_equal(
        net(sum=b, input=x, abs_1=a)["class"].numpy(), np.abs(a.numpy()) - b.numpy()
    )


@each_of("name", ["class", "None", "M", "np", "Path", "load", "Group", "self", "a b", ""])
def test_names_that_no_class_of_a_source_has(name: str) -> None:
    traced = qtrace.trace(Scaling(), images(1, 3, 4, 4), check=False)
    with pytest.raises(GraphError, match="no name of a class, or one that the code uses"):
        g.to_source(traced, name)


class Tied(M.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = M.Conv2d(3, 3, 3, padding=1, bias=False)
        self.second = M.Conv2d(3, 3, 3, padding=1, bias=False)
        self.second.weight = self.first.weight
        self.third = M.Sequential(M.ReLU(), self.first)

    def forward(self, x: Any) -> Any:
        return self.third(self.second(self.first(x)))


def test_what_is_shared_is_shared_in_the_source(tmp_path: Path) -> None:
    x = images(1, 3, 5, 5)
    traced = qtrace.trace(randomize(Tied()), x, check=False)
    net = load(g.to_source(traced), tmp_path)
    assert equal(run(net, (x,)), run(traced, (x,)))
    assert len(list(net.parameters())) == len(list(traced.parameters())) == 1


class Kept(M.Module):
    """A class of a user that a trace keeps whole, and whose constructor takes what it does not keep."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.factor = float(len(text))
        self.offset = mge.Tensor(np.ones(3, np.float32) * 0.5)
        self.inner = M.Linear(3, 3)

    def forward(self, x: Any) -> Any:
        return self.inner(x) * self.factor + self.offset


register_as_builtin(Kept)


def test_a_class_of_a_user_is_made_by_its_attributes(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(2, 3)).astype(np.float32)
    net = M.Sequential(Kept("four"), M.ReLU())
    assert "made(Kept" in check(qtrace.trace(net, x), (x,), tmp_path)


def test_layers_that_were_changed_behind_their_constructor(tmp_path: Path) -> None:
    net = M.Sequential(M.Conv2d(3, 4, 3, bias=False), M.BatchNorm2d(4, affine=False), M.LeakyReLU(0.2))
    net[0].stride = (2, 1)
    net[0].bias = mge.Parameter(np.ones((1, 4, 1, 1), np.float32))
    x = images(1, 3, 9, 9)
    net.eval()
    code = check(qtrace.trace(net, x, check=False), (x,), tmp_path)
    assert "M.Conv2d(3, 4, 3, stride=(2, 1))" in code
    assert "M.BatchNorm2d(4, affine=False)" in code
    assert "M.LeakyReLU(negative_slope=0.2)" in code


def write_odd_names(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    stored = {
        "1x1.weight": rng.normal(size=(4, 3, 1, 1)).astype(np.float32),
        "class": rng.normal(size=(4, 1, 1)).astype(np.float32),
        "lambda/3x3:0": rng.normal(size=(1, 4, 6, 6)).astype(np.float32),
    }
    nodes = [
        oh.make_node("Conv", ["x", "1x1.weight"], ["self"]),
        oh.make_node("Mul", ["self", "class"], ["F"]),
        oh.make_node("Add", ["F", "lambda/3x3:0"], ["import"]),
        oh.make_node("Relu", ["import"], ["M"]),
    ]
    graph = oh.make_graph(
        nodes,
        "net",
        [oh.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 3, 6, 6])],
        [oh.make_tensor_value_info("M", onnx.TensorProto.FLOAT, [1, 4, 6, 6])],
        [onnx.numpy_helper.from_array(value, name) for name, value in stored.items()],
    )
    path = folder / "odd.onnx"
    onnx.save(oh.make_model(graph, opset_imports=[oh.make_opsetid("", 17)]), str(path))
    return path


def test_an_imported_file_with_odd_names(tmp_path: Path) -> None:
    check(qtrace.from_onnx(write_odd_names(tmp_path)), (images(1, 3, 6, 6),), tmp_path)


@pytest.mark.quick(1)
@pytest.mark.parametrize("fakequant", ["fixed", "lsq", "lsq_plus", "pact", "dorefa", "learned_range"])
def test_a_prepared_graph(tmp_path: Path, fakequant: str) -> None:
    net = randomize(M.Sequential(M.Conv2d(3, 4, 3), M.BatchNorm2d(4), M.ReLU(), M.Conv2d(4, 2, 1)))
    x = images(2, 3, 6, 6)
    observers = {"activation": {"mse": {"candidates": 32}}}
    config = {"fakequant": fakequant, "qat": {"bn": {"fold": True}}, "observers": observers}
    prepared = qtrace.prepare(qtrace.trace(net, x, check=False), config)
    qtrace.calibrate(prepared, [(x,)], progress=False)
    code = check(prepared, (x,), tmp_path)
    assert "self.qsites = Group()" in code
    assert "QScheme(" in code
    assert "MeanSquaredError(QScheme(), candidates=32)" in code  # without options that are the default


def test_a_converted_and_an_edited_graph(tmp_path: Path) -> None:
    net = randomize(M.Sequential(M.Conv2d(3, 4, 3), M.ReLU(), M.Conv2d(4, 2, 1)))
    x = images(2, 3, 6, 6)
    traced = qtrace.trace(net, x, check=False)
    prepared = qtrace.prepare(traced, {"placement": "everything"})
    qtrace.calibrate(prepared, [(x,)], progress=False)
    check(qtrace.convert(prepared), (x,), tmp_path / "converted")
    flat = g.flatten(traced)
    relu = next(expr for expr in g.exprs(flat) if expr.outputs[0]._name.endswith("1_out"))
    with g.GraphEditor(flat) as editor:
        editor.replace_expr(relu, editor.call_function(F.sigmoid, relu.inputs[1], after=relu))
    assert "F.sigmoid(" in check(flat, (x,), tmp_path / "edited")


def test_what_has_no_source_is_refused(tmp_path: Path) -> None:
    x = images(1, 3, 4, 4)
    traced = qtrace.trace(M.Conv2d(3, 2, 1), x, check=False)
    with pytest.raises(GraphError, match="'my net' is no name of a class"):
        g.to_source(traced, "my net")
    with pytest.raises(GraphError, match="takes a TracedModule, not a Conv2d"):
        g.to_source(M.Conv2d(3, 2, 1))  # type: ignore[arg-type]
    (tmp_path / "file").write_text("")
    with pytest.raises(GraphError, match="cannot be written"):
        g.to_source(traced).save(tmp_path / "file")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_the_class_and_the_files_have_the_given_name(tmp_path: Path) -> None:
    x = images(1, 3, 4, 4)
    source = g.to_source(qtrace.trace(M.Conv2d(3, 2, 1), x, check=False), "Detector")
    assert source.save(tmp_path).name == "detector.py"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["detector.npz", "detector.py"]
    assert "class Detector(M.Module):" in source.code


def _entry(name: str) -> Any:
    return next(entry for entry in (*CNN, *TRANSFORMERS, *DETECTORS) if entry.name == name)


@pytest.mark.slow
@pytest.mark.usefixtures("synchronous")  # F.arange races when several are queued
@pytest.mark.parametrize(
    "name",
    ["mobilenet_v3", "shufflenet_v2", "hrnet", "deeplab", "swin", "clip", "uniformer", "atss:infer", "detr"],
)
def test_networks_of_the_zoo(tmp_path: Path, name: str) -> None:
    entry = _entry(name)
    arguments = tuple(value[:1] for value in entry.example())
    code = check(qtrace.trace(entry.build(), *arguments, check=False), arguments, tmp_path)
    assert "GetVarShape" not in code or name == "clip"  # which computes with a size in float32
    assert max(map(len, code.splitlines())) <= 120


@pytest.mark.slow
@pytest.mark.usefixtures("synchronous")  # F.arange races when several are queued
@pytest.mark.parametrize("network", ["mobilenet_v3", "hrnet", "vit", "yolox"])
def test_imported_networks_stay_open(tmp_path: Path, network: str) -> None:
    entry = _entry(network)
    arguments = tuple(entry.example())
    module = entry.build()
    (name,) = list(inspect.signature(module.forward).parameters)[: len(arguments)]
    opened = qtrace.trace(module, *arguments, check=False, dynamic={name: {0: "N"}})
    traced = qtrace.from_onnx(qtrace.export(opened, tmp_path / "net.onnx"))
    check(traced, arguments, tmp_path)
    net = load(g.to_source(traced), tmp_path / "again")
    again = qtrace.trace(net, *arguments, check=False)
    more = tuple(np.concatenate([value, value[:1] * 0.5]) for value in arguments)
    for other in (net, again):
        assert equal(run(other, more), run(traced, more))
